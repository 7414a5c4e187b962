"""What `dspark inspect` says of a bundle. Knows manifests; opens nothing."""

from __future__ import annotations

from dspark.runtime.bundle import Bundle, Quantization, state_bytes


def describe_bundle(bundle: Bundle) -> str:
    """Return a line for each thing a user may want to know of a bundle."""
    m, (rings, caches) = bundle.manifest, state_bytes(bundle.manifest)
    t, d, limits = m.target, m.drafter, m.limits
    heads = f"{d.markov_head_type} Markov head" + (f" of rank {d.markov_rank}" if d.markov_rank else "")
    confidence = "confidence head" if d.enable_confidence_head else "no confidence head"
    need = {"fp32": "any provider; the CPU is the default", "fp16": "any provider; slow on the CPU", "bf16": "a GPU engine"}[m.dtype]
    place = f"by reference below {m.weights.root}, {len(m.weights.files)} files" if m.weights.root else "in the bundle"
    size = sum(record.size for record in m.files.values())
    need = "ONNX Runtime; the CPU is the default" if m.quantization else need
    walk = "" if m.markov_topk is None else f", chosen from the {m.markov_topk} most likely before the Markov correction"
    window = f"{m.window} positions" + (", more than a sequence may have" if m.window >= limits.max_seq_len else "")
    rows = [
        ("bundle", f"{bundle.directory}, format {m.format_version}, written by dspark {m.dspark_version}"),
        ("graphs", f"{m.dtype}, opset {m.opset}, operator contract {m.ops_contract}; runs on {need}"),
        ("weights", f"{place}; {size / 1e6:.1f} MB in the bundle"),
        *([("quantised", _quantization(m.quantization))] if m.quantization else []),
        ("target", f"Qwen3, {t.num_hidden_layers} layers, hidden {t.hidden_size}, vocabulary {t.vocab_size}"),
        (
            "drafter",
            f"DSpark, {d.num_hidden_layers} layers, block {d.block_size}, taps {list(d.target_layer_ids)}, {heads}, {confidence}",
        ),
        (
            "proposals",
            f"{m.num_speculative_tokens} a round, verify width {m.num_speculative_tokens + 1}, mask token {d.mask_token_id}{walk}",
        ),
        ("window", f"{window}, ring of {m.ring_capacity} rows"),
        ("limits", f"{limits.max_batch_size} requests, {limits.max_seq_len} tokens each, prefill chunks of {limits.max_chunk}"),
        ("state", f"at most {caches / 1e6:.1f} MB of caches and {rings / 1e6:.1f} MB of rings a request"),
    ]
    for name, engine in m.engines.items():
        kind = ", without weights" if engine.weights_stripped else ""
        rows.append(("engines", f"{name}: {engine.flavour} {engine.version}, compute capability {engine.compute_capability}{kind}"))
    if m.debug_outputs:
        rows.append(("debug", "block hidden states and corrected logits are outputs"))
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def _quantization(q: Quantization) -> str:
    parts = [("target", q.target_bits), ("drafter", q.drafter_bits), ("Markov output", q.markov_bits)]
    bits = ", ".join(f"{part} {'float' if n is None else f'int{n}'}" for part, n in parts if n is not None or part != "Markov output")
    return f"{bits}; a scale for {q.group_size} weights of a row; products round their inputs to 8 bits"
