"""How the page looks: gradio's theme in the Studio's colours, and the style sheets. Imports gradio."""

from pathlib import Path
from typing import Any

import gradio as gr
from gradio.themes.utils import colors, sizes

__all__ = ["HEAD", "look"]

_HERE = Path(__file__).resolve().parent
# The shared pieces first, then what fits gradio's own parts to them.
SHEETS = (_HERE.parent / "studio.css", *sorted(_HERE.glob("*.css")))
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Noto Sans", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]
# The same as in studio.css: its accent, text, lines and grounds are steps of these two.
ACCENT = colors.Color(
    name="engram",
    c50="#eef2fe",
    c100="#e1e9fd",
    c200="#c5d3fb",
    c300="#9ab0ff",
    c400="#7a95f2",
    c500="#4a6bdc",
    c600="#2f54c8",
    c700="#2745a6",
    c800="#203a83",
    c900="#1b2f66",
    c950="#131f42",
)
NEUTRAL = colors.Color(
    name="slate",
    c50="#f7f8fa",
    c100="#f0f2f5",
    c200="#d9dee7",
    c300="#c3cad6",
    c400="#a5aebe",
    c500="#656e80",
    c600="#586172",
    c700="#39414f",
    c800="#2b313d",
    c900="#1d222b",
    c950="#14181f",
)
HEAD = '<meta name="color-scheme" content="light dark"><meta name="viewport" content="width=device-width, initial-scale=1">'


def _theme() -> gr.themes.Base:
    theme = gr.themes.Base(
        primary_hue=ACCENT,
        secondary_hue=ACCENT,
        neutral_hue=NEUTRAL,
        font=FONTS,
        font_mono=MONO,
        radius_size=sizes.radius_md,
        spacing_size=sizes.spacing_md,
        text_size=sizes.text_md,
    )
    return theme.set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color="*neutral_900",
        body_text_color_dark="*neutral_100",
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        background_fill_primary="white",
        background_fill_primary_dark="*neutral_900",
        background_fill_secondary="*neutral_50",
        background_fill_secondary_dark="*neutral_950",
        block_background_fill="white",
        block_background_fill_dark="*neutral_900",
        block_border_color="*neutral_200",
        block_border_color_dark="*neutral_800",
        block_border_width="1px",
        block_shadow="none",
        block_shadow_dark="none",
        block_radius="10px",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_label_border_width="0px",
        block_label_text_color="*neutral_600",
        block_label_text_color_dark="*neutral_300",
        block_title_text_color="*neutral_700",
        block_title_text_color_dark="*neutral_200",
        block_title_text_weight="600",
        block_info_text_color="*neutral_500",
        block_info_text_color_dark="*neutral_400",
        border_color_primary="*neutral_200",
        border_color_primary_dark="*neutral_700",
        border_color_accent="*primary_600",
        border_color_accent_dark="*primary_400",
        color_accent="*primary_600",
        color_accent_soft="*primary_50",
        color_accent_soft_dark="*primary_950",
        link_text_color="*primary_700",
        link_text_color_dark="*primary_300",
        input_border_width="1px",
        button_border_width="1px",
        input_background_fill="white",
        input_background_fill_dark="*neutral_950",
        input_border_color="*neutral_300",
        input_border_color_dark="*neutral_700",
        input_border_color_focus="*primary_600",
        input_border_color_focus_dark="*primary_400",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        input_shadow="none",
        input_shadow_focus="none",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_dark="*primary_300",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_hover_dark="*primary_200",
        button_primary_text_color="white",
        button_primary_text_color_dark="*primary_950",
        button_primary_border_color="transparent",
        button_primary_border_color_dark="transparent",
        button_primary_shadow="none",
        button_secondary_background_fill="white",
        button_secondary_background_fill_dark="*neutral_900",
        button_secondary_background_fill_hover="*neutral_100",
        button_secondary_background_fill_hover_dark="*neutral_800",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="*neutral_700",
        button_secondary_text_color="*neutral_800",
        button_secondary_text_color_dark="*neutral_100",
        button_secondary_shadow="none",
        button_cancel_background_fill="white",
        button_cancel_background_fill_dark="*neutral_900",
        button_cancel_background_fill_hover="#fdecea",
        button_cancel_background_fill_hover_dark="#3a1512",
        button_cancel_border_color="#d9a29c",
        button_cancel_border_color_dark="#7a3a33",
        button_cancel_text_color="#9c2b20",
        button_cancel_text_color_dark="#f3a79f",
        button_large_radius="8px",
        button_medium_radius="8px",
        button_small_radius="8px",
        button_transition="background-color 120ms",
        slider_color="*primary_600",
        slider_color_dark="*primary_400",
        checkbox_background_color_selected="*primary_600",
        checkbox_background_color_selected_dark="*primary_500",
        checkbox_border_color_selected="*primary_600",
        checkbox_border_color_selected_dark="*primary_500",
        checkbox_label_background_fill_selected="*primary_50",
        checkbox_label_background_fill_selected_dark="*primary_950",
        checkbox_label_border_color_selected="*primary_600",
        checkbox_label_border_color_selected_dark="*primary_400",
        checkbox_label_text_color_selected="*neutral_900",
        checkbox_label_text_color_selected_dark="*neutral_50",
        loader_color="*primary_600",
        error_background_fill="#fdf3f2",
        error_background_fill_dark="#2a1311",
        error_text_color="#9c2b20",
        error_text_color_dark="#f3a79f",
    )


def look() -> dict[str, Any]:
    """What `launch` takes: theme, style sheets, head."""
    return {"theme": _theme(), "css_paths": list(SHEETS), "head": HEAD}
