"""Figures and pages that answer a question a person has."""
