"""Jobs on other machines: a recipe becomes a folder that Azure ML's command line submits.

`make_azureml_job` writes the folder. Nothing here submits, needs an account or imports Azure's packages. Knows recipes
as `check` reads them; knows no Olive and no model.
"""

from olive_ext.jobs.azureml import make_azureml_job, submit_command

__all__ = ["make_azureml_job", "submit_command"]
