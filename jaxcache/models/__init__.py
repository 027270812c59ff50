"""Flax NNX models and weight loading."""

if __name__ != "jaxcache.models":
    raise ImportError(
        f"this folder was imported as {__name__!r}; the link at the top of the checkout is for readers: "
        "import jaxcache.models instead"
    )
