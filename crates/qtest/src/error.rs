//! Errors between a program and its QEMU.

use std::{io, process::ExitStatus, time::Duration};

/// Why a command was not done.
///
/// After [`Refused`](Self::Refused) and [`Command`](Self::Command) the machine is as it was and can
/// be used further. After all others it is not known to what the next answer would belong, so every
/// later command is an [`OutOfStep`](Self::OutOfStep).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program cannot be started.
    #[error("{program} cannot be started")]
    Start {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// There is no QEMU at this socket.
    #[error("no connection to {path}")]
    Connect {
        /// The socket.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// QEMU has ended, or closed the connection, before it answered.
    #[error("QEMU ended before it answered `{command}` ({}){}", ended(*.status), last_words(.said))]
    Died {
        /// The command.
        command: String,
        /// How it ended, where it was started by us and has ended.
        status: Option<ExitStatus>,
        /// The end of what it said on its standard error.
        said: String,
    },
    /// QEMU does not do what was asked.
    #[error("QEMU refuses `{command}`: {answer}")]
    Refused {
        /// The command.
        command: String,
        /// Its answer.
        answer: String,
    },
    /// No answer came in time.
    #[error("no answer to `{command}` within {after:?}")]
    TimedOut {
        /// The command.
        command: String,
        /// How long was waited.
        after: Duration,
    },
    /// A line that is no answer to the command.
    #[error("`{answer}` is no answer to `{command}`")]
    Garbled {
        /// The command; empty for what came without one.
        command: String,
        /// The line, or the beginning of it.
        answer: String,
    },
    /// The connection does not work.
    #[error("`{command}` cannot be sent or its answer not be received")]
    Io {
        /// The command.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// An earlier command has failed in a way that leaves answers without an owner.
    #[error("`{command}` is not sent, since an earlier command failed and answers are out of step")]
    OutOfStep {
        /// The command.
        command: String,
    },
    /// A command that is no single line. Nothing was sent.
    #[error("`{command}` is no single line")]
    Command {
        /// The command.
        command: String,
    },
}

fn ended(status: Option<ExitStatus>) -> String {
    status.map_or_else(|| "status unknown".into(), |status| status.to_string())
}

fn last_words(said: &str) -> String {
    match said.trim() {
        "" => String::new(),
        said => format!(": {said}"),
    }
}

/// So much of a command or an answer as an error shows.
pub(crate) fn shown(text: &str) -> String {
    const MOST: usize = 120;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn the_cause_is_said_once() {
        let source = io::Error::from_raw_os_error(2);
        let program = "qemu".into();
        let error = Error::Start { program, source };
        let cause = error.source().map(ToString::to_string);
        assert!(cause.is_some_and(|cause| !error.to_string().contains(&cause)));
    }
}
