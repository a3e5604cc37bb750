"""Small adapters for other frameworks, one module each; no module here imports another one.

Import the one you need, such as `semidice.integrations.monai`. The extra of the same name
installs its framework.
"""
