//! The prompt of a run.

use kvbaton::{Error, ErrorKind};

use super::super::{parse_ids, read_text};
use crate::args::Prompt;

/// The ids of the prompt, read or encoded.
pub(super) fn prompt_tokens(
    prompt: &Prompt,
    encode: &dyn Fn(&str) -> Result<Vec<u32>, Error>,
) -> Result<Vec<u32>, Error> {
    if let Some(path) = &prompt.prompt_tokens {
        return parse_ids(&read_text(path)?, &path.display().to_string());
    }
    let text = match (&prompt.prompt, &prompt.prompt_file) {
        (Some(text), _) => text.clone(),
        // An editor's last line break is not part of the prompt.
        (None, Some(path)) => {
            let text = read_text(path)?;
            text.strip_suffix('\n').map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t)).to_owned()
        }
        (None, None) => return Err(Error::new(ErrorKind::Usage, "no prompt was given")),
    };
    encode(&text)
}

/// The prompt's own length in an error that speaks of the tokens to be prefilled.
pub(in crate::commands) fn whole_prompt(error: Error, prompt_tokens: usize) -> Error {
    if error.kind() != ErrorKind::PromptTooLong {
        return error;
    }
    let limit = |name: &str| error.fields().get(name).and_then(|v| v.as_u64());
    let hint =
        format!("shorten the prompt, or export with --context {}", (prompt_tokens - 1).next_power_of_two());
    let (name, most, what) = match (limit("longest_function"), limit("context")) {
        (Some(longest), _) => ("longest_function", longest, "longest function"),
        (None, context) => ("context", context.unwrap_or(0), "largest context"),
    };
    Error::new(
        ErrorKind::PromptTooLong,
        format!(
            "the prompt has {prompt_tokens} tokens; the package takes at most {} (its {what} of {most} and the token \
             that decoding starts with)",
            most + 1
        ),
    )
    .hint(hint)
    .field("prompt_tokens", prompt_tokens)
    .field(name, most)
}
