"""A LoRA adapter that several peers tune together: after each round each of them holds the mean of their models.

    python -m examples.adapters                           # in one terminal; it prints where it listens
    python -m examples.adapters --join HOST:PORT          # in another one, while the first one trains

The base is a small Llama of transformers with random weights, the same at all peers (--base-seed), so nothing is
downloaded. Each peer learns other sentences. With --output DIR a peer writes the adapter with its correction at the
end, which plain peft loads, and the merged model. With --publish RANK engines get each version of the adapter, see
`averaging follow --adapter`. It needs `pip install '.[peft]'`.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import torch

from averaging import DecentralizedAverager, Receipt, WeightPublisher
from averaging.protocol import Mode
from examples.command_line import in_order, parse, parser_of, positive, security_of

TEXTS = ["the quick brown fox ", "jumps over the lazy ", "dog and runs away from ", "the hunter in the wood "]
CONTEXT = 32


def main(arguments: list[str] | None = None) -> None:
    """Tunes as configured on the command line."""
    parser = parser_of("adapters", "A LoRA adapter of a small language model, tuned by several peers.")
    parser.add_argument("--steps", type=positive, default=300, help="local steps; a newcomer begins at the run's (300)")
    parser.add_argument("--sync-every", type=positive, default=20, help="local steps between two rounds (20)")
    parser.add_argument("--own-rank", type=positive, default=4, help="rank of this peer's adapter (4)")
    parser.add_argument("--rank", type=positive, default=8, help="to which adapters are padded, alike at all peers (8)")
    parser.add_argument("--base-seed", type=int, default=0, help="makes the base, alike at all peers (0)")
    parser.add_argument(
        "--text", type=int, choices=range(len(TEXTS)), default=0, help="which text this peer learns (0)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the adapter and the merged model here")
    parser.add_argument("--publish", type=positive, metavar="RANK", help="publish the adapter until Ctrl+C")
    options = parse(parser, arguments)
    with in_order(parser):
        tune(options)


def base_of(seed: int) -> Any:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def tune(options: argparse.Namespace) -> None:
    """Tunes as one peer of the run."""
    from peft import LoraConfig, get_peft_model

    from averaging.integrations.peft import LoRAAveraging

    torch.set_num_threads(1)  # several processes share few cores
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(
        base_of(options.base_seed),
        LoraConfig(r=options.own_rank, lora_alpha=16, target_modules=targets, modules_to_save=["lm_head"]),
    )
    strategy = LoRAAveraging(model, options.sync_every, rank=options.rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    services = [WeightPublisher(strategy.adapter_view(options.publish))] if options.publish else []
    characters = torch.tensor([ord(character) for character in TEXTS[options.text] * CONTEXT])
    with DecentralizedAverager(
        optimizer,
        model=model,
        strategy=strategy,
        run_id=options.run_id,
        join=options.join,
        listen=options.listen,
        advertise=options.advertise,
        mode=Mode.CLIENT if options.client_mode else Mode.NODE,
        group_size=4,
        on_round=report,
        services=services,
        **security_of(options),
    ) as opt:
        if not options.client_mode:
            print(f"Other peers join with --join {opt.endpoint}", flush=True)
        if opt.local_step == 0:
            opt.wait_for_peers(options.wait_for, 60.0)
        for step in range(opt.local_step, options.steps):
            starts = torch.randint(len(characters) - CONTEXT, (8,)).tolist()
            words = torch.stack([characters[start : start + CONTEXT] for start in starts])
            opt.zero_grad()
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            opt.step()
            if (step + 1) % 50 == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
        print(f"Done: {opt.finish()}", flush=True)
        if services:
            print(f"Version {services[0].version} is published until Ctrl+C", flush=True)
            with suppress(KeyboardInterrupt):
                Event().wait()
    if options.output is not None:
        write(strategy, options)


def report(receipt: Receipt) -> None:
    """Prints each round."""
    print(receipt, flush=True)


def write(strategy: Any, options: argparse.Namespace) -> None:
    """Writes the adapter and the merged model."""
    strategy.save_adapter(options.output / "adapter")
    print(f"Wrote {options.output / 'adapter'}: PeftModel.from_pretrained(base, ...) loads it", flush=True)
    strategy.merge().save_pretrained(options.output / "merged")
    print(f"Wrote {options.output / 'merged'}: LlamaForCausalLM.from_pretrained(...) loads it", flush=True)


if __name__ == "__main__":
    main()
