"""Widgets that views share."""
