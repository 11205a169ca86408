"""Conversion of image files to the normalized patches that a vision tower reads."""
