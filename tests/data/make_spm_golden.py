"""Makes spm_bpe.json: a tiny SentencePiece BPE vocabulary and what SentencePiece itself does with some texts.

pip install sentencepiece && python tests/data/make_spm_golden.py
"""

import io
import json
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent
VOCABULARY_SIZE = 600
TEXTS = [
    "Hello world",
    " leading and  double   spaces ",
    "Licensed under the Apache License, Version 2.0",
    "naïve café — 日本語 😀",
    "line one\nline two\n\n\tindented",
    "x = {'a': [1, 2, 3]}  # comment",
    "",
    "a",
    " ",
    "distribution distributions redistribution",
]


def main() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((HERE.parents[1] / "LICENSE").read_text().splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())
    types = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in ids
    ]
    golden = {
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "types": types,
        "cases": [{"text": text, "ids": processor.encode(text)} for text in TEXTS],
    }
    (HERE / "spm_bpe.json").write_text(json.dumps(golden, ensure_ascii=False, indent=None) + "\n")


if __name__ == "__main__":
    main()
