"""Jobs on other machines: a recipe becomes a folder that Azure ML's command line submits.

`make_azureml_job` writes the folder, `faults` says what is wrong with one. Nothing here submits, needs an account or
imports Azure's packages. Knows recipes as `check` reads them; knows no Olive and no model.
"""

from olive_ext.jobs.azureml import make_azureml_job, submit_command
from olive_ext.jobs.azureml_check import faults

__all__ = ["faults", "make_azureml_job", "submit_command"]
