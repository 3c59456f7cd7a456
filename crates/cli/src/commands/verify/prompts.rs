//! Prompts from files: JSONL, text, or a folder of both.

use std::path::{Path, PathBuf};

use kvbaton::{Error, ErrorKind};
use serde::Deserialize;

use crate::commands::read_text;
use crate::host::Decoder;

/// A prompt and what a report calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prompt {
    pub(super) name: String,
    pub(super) text: Text,
}

/// What is to be prefilled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Text {
    Words(String),
    Tokens(Vec<u32>),
}

/// A line of a JSONL file. Other fields are the user's own.
#[derive(Deserialize)]
struct Line {
    prompt: Option<String>,
    tokens: Option<Vec<u32>>,
    name: Option<String>,
}

impl Prompt {
    /// Its ids.
    pub(super) fn encode(&self, decoder: &dyn Decoder, ignore_template: bool) -> Result<Vec<u32>, Error> {
        match &self.text {
            Text::Words(words) => decoder.encode(words, ignore_template),
            Text::Tokens(ids) => Ok(ids.clone()),
        }
    }
}

/// Reads all prompts of a file, or of the files of a folder in the order of their names.
pub(super) fn read(path: &Path) -> Result<Vec<Prompt>, Error> {
    let prompts = if path.is_dir() {
        let mut all = Vec::new();
        for file in files(path)? {
            all.extend(read_file(&file)?);
        }
        all
    } else {
        read_file(path)?
    };
    if prompts.is_empty() {
        let message = format!("`{}` has no prompts", path.display());
        return Err(Error::new(ErrorKind::Usage, message)
            .hint("one JSON object a line, with `prompt` or `tokens`; or a folder of .jsonl and .txt files")
            .field("path", path.display().to_string()));
    }
    Ok(prompts)
}

fn files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = std::fs::read_dir(folder).map_err(|e| {
        Error::new(ErrorKind::Usage, format!("cannot read the folder `{}`: {e}", folder.display()))
    })?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| matches!(extension(p), "jsonl" | "txt") && p.is_file())
        .collect();
    files.sort();
    Ok(files)
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|e| e.to_str()).unwrap_or("")
}

fn read_file(path: &Path) -> Result<Vec<Prompt>, Error> {
    let text = read_text(path)?;
    // An editor's mark of the encoding is not part of a prompt either.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let name = path.file_name().map_or_else(|| "-".to_owned(), |n| n.to_string_lossy().into_owned());
    if extension(path) == "txt" {
        // An editor's last line break is not part of the prompt.
        let words = text.strip_suffix('\n').map_or(text, |t| t.strip_suffix('\r').unwrap_or(t));
        return Ok(vec![Prompt { name, text: Text::Words(words.to_owned()) }]);
    }
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(at, line)| prompt(&name, at + 1, line)).collect()
}

fn prompt(file: &str, number: usize, line: &str) -> Result<Prompt, Error> {
    let wrong = |why: String| {
        Error::new(ErrorKind::Usage, format!("line {number} of `{file}` is no prompt: {why}"))
            .hint("one JSON object a line, with `prompt` (text) or `tokens` (ids)")
            .field("line", number)
    };
    // A list would be taken for the values of the fields in their order.
    if line.trim_start().starts_with('[') {
        return Err(wrong("it is a list".to_owned()));
    }
    let found: Line = serde_json::from_str(line).map_err(|e| wrong(within_line(&e)))?;
    let text = match (found.prompt, found.tokens) {
        (Some(words), None) => Text::Words(words),
        (None, Some(ids)) => Text::Tokens(ids),
        (Some(_), Some(_)) => return Err(wrong("it has both `prompt` and `tokens`".to_owned())),
        (None, None) => return Err(wrong("it has neither `prompt` nor `tokens`".to_owned())),
    };
    Ok(Prompt { name: found.name.unwrap_or_else(|| format!("{file}:{number}")), text })
}

/// What is wrong, and at which column: every line is parsed by itself, as the first one.
fn within_line(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&place).map_or(text.clone(), |what| format!("{what} at column {}", error.column()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Result<Vec<Prompt>, Error> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.jsonl");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn lines_have_text_or_ids() {
        let read = lines("{\"prompt\": \"one\"}\n\n{\"tokens\": [1, 2], \"name\": \"two\", \"source\": 3}\n")
            .unwrap();
        assert_eq!(read[0], Prompt { name: "p.jsonl:1".into(), text: Text::Words("one".into()) });
        assert_eq!(read[1], Prompt { name: "two".into(), text: Text::Tokens(vec![1, 2]) });
    }

    #[test]
    fn a_line_that_is_no_prompt_is_named() {
        for (text, says) in [
            ("{\"prompt\": \"a\"}\nnot json\n", "line 2"),
            ("{\"prompt\": \"a\", \"tokens\": [1]}", "both"),
            ("{\"text\": \"a\"}", "neither"),
            ("{\"tokens\": [-1]}", "line 1"),
            ("{\"tokens\": [1.5]}", "line 1"),
            ("[1, 2]", "line 1"),
            ("[\"hello\", null, \"name\"]", "line 1 of `p.jsonl` is no prompt: it is a list"),
            ("[{\"prompt\": \"a\"}]", "it is a list"),
            ("{\"prompt\": \"a\"}\n{\"tokens\": [1, -2]}", "expected u32 at column 17"),
        ] {
            let error = lines(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.to_string().contains(says), "{error}");
            assert!(!error.to_string().contains("at line"), "{error}");
        }
        assert!(lines("\n \n").unwrap_err().to_string().contains("has no prompts"));
    }

    #[test]
    fn what_editors_add_is_no_part_of_a_prompt() {
        let read = lines("\u{feff}{\"prompt\": \"a\"}\r\n{\"prompt\": \"b\"}\r\n").unwrap();
        assert_eq!(read.len(), 2);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.txt");
        for text in ["words", "words\n", "words\r\n", "\u{feff}words\r\n"] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(super::read(&path).unwrap()[0].text, Text::Words("words".into()));
        }
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_its_names() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [("b.txt", "second\n"), ("a.jsonl", "{\"prompt\": \"first\"}"), ("c.md", "none")]
        {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let read = read(folder.path()).unwrap();
        let names: Vec<&str> = read.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["a.jsonl:1", "b.txt"]);
        assert_eq!(read[1].text, Text::Words("second".into()));
        let empty = tempfile::tempdir().unwrap();
        assert!(super::read(empty.path()).unwrap_err().to_string().contains("has no prompts"));
    }
}
