"""What connects evaluation frameworks: one room for each framework (`lm_eval`), and what they share.

Here are the loading of tasks and metrics, the run of lm-eval, the models that it drives (`OrtLM`, the Hugging Face
baseline, the peers we compare with), and the reading of its answers. `run`, `workflow` and `bench` import single
modules, most of them inside functions, since lm-eval and torch take seconds to import; this package itself exports
nothing. Knows no report, no recipe and no Olive.
"""
