"""A random decoder model on disk: real architecture, no download, the same weights for the same seed."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

# The default spread of 0.02 makes a random model repeat one token whatever the prompt says. At 0.2 the greedy
# tokens depend on the whole context, so a wrong KV block changes them.
INIT_SPREAD = 0.2


@dataclass(frozen=True)
class Shape:
    """Sizes of the model.

    `demo` is big enough that prefill is worth saving on two cores, `tiny` is for tests.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 320
    max_tokens: int = 32768

    @property
    def parameters(self) -> int:
        head = self.hidden // self.heads
        kv = head * self.kv_heads
        attention = self.hidden * (2 * self.hidden + 2 * kv) + self.hidden + 2 * kv
        return (
            self.layers * (attention + 6 * self.hidden**2 + 2 * self.hidden)
            + 2 * self.vocab * self.hidden
            + self.hidden
        )


SHAPES = {
    "demo": Shape(hidden=512, layers=8, heads=8, kv_heads=4),
    "tiny": Shape(hidden=128, layers=4, heads=4, kv_heads=2, max_tokens=4096),
}


def make_model(out: Path, shape: Shape, *, seed: int = 0) -> Path:
    """Write a Qwen2-type model with random float32 weights to `out`;

    nothing is done when it is there already.
    """
    done = out / "kvpool-demo.json"
    wanted = {"shape": vars(shape), "seed": seed, "spread": INIT_SPREAD}
    if done.exists() and json.loads(done.read_text()) == wanted:
        return out

    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_tokens,
        initializer_range=INIT_SPREAD,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.save_pretrained(out, safe_serialization=True)
    done.write_text(json.dumps(wanted))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_model(args.out, SHAPES[args.shape], seed=args.seed))


if __name__ == "__main__":
    main()
