"""What reports and commands share: files of prompts, answers in tables, drawings, pages, and where something ran."""
