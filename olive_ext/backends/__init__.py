"""Doors to evaluation frameworks: one room a framework (`lm_eval`), and what they share.

Here live task loading and metrics, the run of lm-eval, the models that it drives (`OrtLM`, the Hugging Face baseline,
the peers we compare with) and the answers read back from it. `run`, `workflow` and `bench` import single modules, most
of them inside functions, since lm-eval and torch take seconds to import; this package itself exports nothing. Knows no
report, no recipe and no Olive.
"""
