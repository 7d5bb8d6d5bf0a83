"""Sphinx's settings for the site. `make docs` builds it from what pages.py gathers."""

project = "r1flow"
root_doc = "index"
extensions = ["myst_parser", "sphinx_copybutton"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 6  # those of GitHub, so that a link with an anchor leads to the same place on both
myst_linkify_fuzzy_links = False

smartquotes = False
add_module_names = False
maximum_signature_line_length = 90
toc_object_entries = False
python_display_short_literal_types = True

html_theme = "furo"  # loads nothing from other hosts: no fonts, no scripts
html_title = "r1flow"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "default"
pygments_dark_style = "github-dark"
