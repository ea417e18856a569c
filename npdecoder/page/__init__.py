"""The page: one HTML file in which a trace is walked through, forward and back."""

from npdecoder.page.build import Tokens, page, write_page

__all__ = ["Tokens", "page", "write_page"]
