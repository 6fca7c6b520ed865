"""What connects lm-eval: the loading of tasks and their metrics, the run of lm-eval, and the model that it drives
(`lm_eval.OrtLM`). Plug-ins connect other frameworks.

Other rooms import single modules, most of them inside functions, since lm-eval and torch take seconds to import; this
package itself exports nothing. Knows no recipe and no Olive.
"""
