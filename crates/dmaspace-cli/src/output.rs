//! Output of the commands: results on stdout, sentences on stderr, exit statuses.

use std::error::Error;
use std::io::{self, Write as _};

use crate::draw::terminal;

/// Exit statuses.
pub(crate) mod exit {
    /// All was right.
    pub(crate) const RIGHT: u8 = 0;
    /// Something is wrong: with the memory, the machine or this program.
    pub(crate) const WRONG: u8 = 1;
    /// The request cannot be fulfilled, or its result cannot be written.
    pub(crate) const INPUT: u8 = 2;
    /// A signal ended it; what a shell reports for SIGINT.
    pub(crate) const INTERRUPTED: u8 = 130;
}

/// Prints to stdout; a reader that has left wants no more, which is fine.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    tell_on(text).map(drop)
}

/// Prints to stdout; false when the reader has left.
pub(crate) fn tell_on(text: &str) -> anyhow::Result<bool> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(terminal::shown(text).as_bytes())
        .and_then(|()| stdout.flush())
    {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(anyhow::Error::new(error).context("cannot write to standard output")),
    }
}

/// An error with all its causes, as one sentence.
pub(crate) fn sentence(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some messages quote their cause already.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

/// Says why a request cannot be fulfilled; its exit status.
pub(crate) fn refuse(error: &anyhow::Error) -> u8 {
    fail(error.as_ref(), exit::INPUT)
}

/// Says what went wrong; `status`.
pub(crate) fn fail(error: &dyn Error, status: u8) -> u8 {
    say(&sentence(error));
    status
}

/// A sentence on stderr. A failure to write it cannot be reported.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "dmaspace: {}", terminal::shown(text));
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn a_chain_of_causes_is_one_sentence_without_repetition() {
        let error = anyhow!("the disk is full")
            .context("cannot write: the disk is full")
            .context("cannot draw");
        assert_eq!(
            sentence(error.as_ref()),
            "cannot draw: cannot write: the disk is full"
        );
    }
}
