//! Errors as sentences, for callers that cannot take them as values.

use std::error::Error;

/// An error with all its causes, as one sentence.
pub(crate) fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
