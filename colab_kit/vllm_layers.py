"""What the kit puts in the place of vLLM's own layers, and why."""

from __future__ import annotations

import inspect

from .products import Products


def install_layers(products: Products) -> None:
    """Before an engine starts, after vLLM's plugins were loaded."""
    install_linear_method(products)
    install_updates(products)
    install_lora()


def install_linear_method(products: Products) -> None:
    """4-bit weights: any dtype of activations, each in its own; for decoding, nf4.py where it is faster."""
    import torch
    from bitsandbytes import matmul_4bit
    from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm_bnb_plugin.bitsandbytes import BitsAndBytesConfig, BitsAndBytesLinearMethod

    @register_weight_loader_v2_supported_method
    class SharedBitsAndBytesLinearMethod(BitsAndBytesLinearMethod):
        def create_weights(self, layer, *args, **kwargs):
            # Two 4-bit values share a byte whatever the activations' dtype; the plugin derives the ratio from it.
            call = inspect.signature(super().create_weights).bind(layer, *args, **kwargs)
            if not self.quant_config.load_in_8bit:
                call.arguments["params_dtype"] = torch.bfloat16
            super().create_weights(*call.args, **call.kwargs)

        def _apply_4bit_weight(self, layer, x, bias=None):
            # In x's own dtype: on a T4 the fused kernel is float16's, and a cast to bfloat16 would miss it.
            weight, states = layer.weight, layer.weight.bnb_quant_state
            states = [states[i] for i in range(len(states))]
            offsets = weight.bnb_shard_offsets.tolist()

            def unpacked(x):
                rows = [weight[i:j] for i, j in zip(offsets, offsets[1:], strict=False)]
                parts = [matmul_4bit(x, r.t(), state) for r, state in zip(rows, states, strict=True)]
                return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

            flat = x.reshape(-1, x.shape[-1])
            out = products.apply(layer, flat, weight, states, unpacked).view(*x.shape[:-1], -1)
            return out if bias is None else out + bias

    class SharedBitsAndBytesConfig(BitsAndBytesConfig):
        def get_quant_method(self, layer, prefix):
            method = super().get_quant_method(layer, prefix)
            return SharedBitsAndBytesLinearMethod(self) if type(method) is BitsAndBytesLinearMethod else method

    register_quantization_config("bitsandbytes")(SharedBitsAndBytesConfig)


def install_updates(products: Products) -> None:
    """LoRA's update in the same product as the weight, where nf4.cu does it; else `add_lora_linear` below adds it."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    def _apply_sync(self, x, bias=None):
        update = products.update = products.update_of(self, x)
        try:
            output = self._get_quant_method().apply(self.base_layer, x, bias)
            added = update is not None and products.update is None
        finally:
            products.update = None
        return output if added else self._apply_lora_to_output(x, output)

    BaseLinearLayerWithLoRA._apply_sync = _apply_sync


def install_lora() -> None:
    """LoRA as plain matrix products: with the kit's one slot the adapter is the same for every row that has one.

    vLLM's own kernels on a GPU don't use a T4's matrix units, and add with atomics, so that greedy answers need not
    repeat. On a CPU they gather a copy of both matrices for every token, and apply the adapter to requests that asked
    for none (index -1 wraps around).
    """
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    def add_lora_linear(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **_):
        rows, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        chosen = chosen_rows(self, x.shape[0])
        if chosen is None:
            return
        for part, a, b in zip(rows.split(output_slices, dim=1), lora_a_stacked, lora_b_stacked, strict=True):
            part.addmm_(torch.nn.functional.linear(x, a[0, 0]) * chosen, b[0, 0].t(), alpha=scale)

    def chosen_rows(wrapper, rows):
        """[rows, 1], whether each has the adapter; None if it is known without asking the GPU that none has."""
        if isinstance(wrapper, PunicaWrapperGPU):
            slots = wrapper.token_mapping_meta
            return None if slots.no_lora_flag_cpu.item() else (slots.token_lora_mapping[:rows] >= 0)[:, None]
        chosen = (wrapper.token_lora_indices[:rows] >= 0)[:, None]
        return chosen if chosen.any() else None

    PunicaWrapperCPU.add_lora_linear = PunicaWrapperGPU.add_lora_linear = add_lora_linear
