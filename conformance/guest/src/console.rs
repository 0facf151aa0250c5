//! Lines of the guest about its tests, and their evaluation on the host.
//!
//! The lines go through a serial port of their own, since the kernel writes to the first one
//! whenever it likes, also into the middle of a line:
//!
//! ```text
//! run NAME             a test begins
//! ok NAME              it passed
//! FAILED NAME: why     it did not
//! ask QUESTION         the host answers with a line of its own
//! keep FILE TEXT       a line of a file that the host keeps
//! done                 all were run, and the guest powers off
//! ```
//!
//! A test that hangs is known by the `run` without an end. A guest that dies leaves no `done`.

use std::{collections::BTreeMap, fmt, fs, io, path::Path};

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// A test begins.
    Run(String),
    /// It passed.
    Ok(String),
    /// It did not, and why.
    Failed(String, String),
    /// The guest waits for an answer of the host.
    Ask(String),
    /// A line of a file, without a space in its name, that the host keeps.
    Keep(String, String),
    /// All were run.
    Done,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(name) => write!(f, "run {name}"),
            Self::Ok(name) => write!(f, "ok {name}"),
            // One line, whatever the reason.
            Self::Failed(name, why) => write!(f, "FAILED {name}: {}", why.replace('\n', "; ")),
            Self::Ask(question) => write!(f, "ask {question}"),
            Self::Keep(file, text) => write!(f, "keep {file} {text}"),
            Self::Done => f.write_str("done"),
        }
    }
}

impl Line {
    /// Reads a line; `None` for anything else, such as what firmware says.
    pub fn parse(line: &str) -> Option<Self> {
        let line = line.trim_end();
        if line == "done" {
            return Some(Self::Done);
        }
        let (word, rest) = line.split_once(' ')?;
        match word {
            "run" => Some(Self::Run(rest.to_owned())),
            "ok" => Some(Self::Ok(rest.to_owned())),
            "ask" => Some(Self::Ask(rest.to_owned())),
            "keep" => {
                let (file, text) = rest.split_once(' ').unwrap_or((rest, ""));
                Some(Self::Keep(file.to_owned(), text.to_owned()))
            }
            "FAILED" => {
                let (name, why) = rest.split_once(": ")?;
                Some(Self::Failed(name.to_owned(), why.to_owned()))
            }
            _ => None,
        }
    }
}

/// Results of the tests that were expected.
#[derive(Debug)]
pub struct Results<'a> {
    expected: Vec<(&'a str, State)>,
    done: bool,
    faults: Vec<String>,
    kept: BTreeMap<String, String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Running,
    Passed,
    Failed,
}

impl<'a> Results<'a> {
    /// Results of these tests, none of which has begun.
    pub fn new(expected: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            expected: expected
                .into_iter()
                .map(|name| (name, State::Waiting))
                .collect(),
            done: false,
            faults: Vec::new(),
            kept: BTreeMap::new(),
        }
    }

    /// Takes the next line.
    pub fn take(&mut self, line: &Line) {
        match line {
            Line::Run(name) => self.step(name, State::Waiting, State::Running),
            Line::Ok(name) => self.step(name, State::Running, State::Passed),
            Line::Failed(name, why) => {
                self.step(name, State::Running, State::Failed);
                self.faults.push(format!("{name}: {why}"));
            }
            Line::Ask(_) => {}
            Line::Keep(file, text) => {
                let kept = self.kept.entry(file.clone()).or_default();
                kept.push_str(text);
                kept.push('\n');
            }
            Line::Done => self.done = true,
        }
    }

    /// Something is wrong on the host's side.
    pub fn fault(&mut self, what: String) {
        self.faults.push(what);
    }

    fn step(&mut self, name: &str, from: State, to: State) {
        match self.expected.iter_mut().find(|(known, _)| *known == name) {
            Some((_, state)) if *state == from => *state = to,
            Some((_, state)) => {
                let fault = format!("{name}: {to:?} was said of it while it was {state:?}");
                self.faults.push(fault);
            }
            None => self.faults.push(format!("{name}: nobody asked for it")),
        }
    }

    /// Writes the files that the guest has the host keep.
    ///
    /// # Errors
    ///
    /// When one cannot be written.
    pub fn keep(&self, directory: &Path) -> io::Result<()> {
        for (file, text) in &self.kept {
            let path = directory.join(file);
            fs::create_dir_all(path.parent().unwrap_or(directory))?;
            fs::write(&path, text)?;
        }
        Ok(())
    }

    /// True when the guest has said its last word.
    pub fn done(&self) -> bool {
        self.done
    }

    /// How many passed.
    pub fn passed(&self) -> usize {
        self.of(State::Passed).len()
    }

    fn of(&self, wanted: State) -> Vec<&'a str> {
        let some = self.expected.iter().filter(|(_, state)| *state == wanted);
        some.map(|(name, _)| *name).collect()
    }

    /// Everything that is wrong, a sentence each: tests that failed, hung or never ran, and a
    /// guest that did not come to its end.
    pub fn faults(mut self) -> Vec<String> {
        for name in self.of(State::Running) {
            let fault = format!("{name}: did not come to its end");
            self.faults.push(fault);
        }
        let waiting = self.of(State::Waiting);
        if !waiting.is_empty() {
            let fault = format!("did not run: {}", waiting.join(", "));
            self.faults.push(fault);
        }
        if !self.done {
            self.faults.push("the guest did not come to its end".into());
        }
        self.faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(lines: &str) -> Vec<String> {
        let mut results = Results::new(["a", "b"]);
        for line in lines.lines().filter_map(Line::parse) {
            results.take(&line);
        }
        results.faults()
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        for line in [
            Line::Run("a_b".into()),
            Line::Ok("a_b".into()),
            Line::Failed("a_b".into(), "one: two".into()),
            Line::Ask("read 28 1000 8".into()),
            Line::Keep("a/b".into(), "  of it".into()),
            Line::Keep("a/b".into(), String::new()),
            Line::Done,
        ] {
            assert_eq!(Line::parse(&format!("{line}\r\n")), Some(line));
        }
        let two = Line::Failed("a".into(), "one\ntwo".into());
        assert_eq!(two.to_string(), "FAILED a: one; two");
    }

    #[test]
    fn what_is_no_result_is_passed_over() {
        for line in ["", "SeaBIOS (version 1.16)", "ok", "doneness", "FAILED a"] {
            assert_eq!(Line::parse(line), None, "{line}");
        }
    }

    #[test]
    fn all_passed_and_done_is_no_fault() {
        assert!(faults("run a\nok a\nrun b\nok b\ndone").is_empty());
    }

    #[test]
    fn a_test_that_failed_hung_or_never_ran_is_a_fault() {
        assert_eq!(
            faults("run a\nFAILED a: why\nrun b\nok b\ndone"),
            ["a: why"]
        );
        assert_eq!(
            faults("run a\nok a\nrun b"),
            [
                "b: did not come to its end",
                "the guest did not come to its end"
            ]
        );
        assert_eq!(faults("run a\nok a\ndone"), ["did not run: b"]);
        assert_eq!(faults("run a\nok a\nrun b\nok b").len(), 1, "no last word");
    }

    #[test]
    fn a_guest_that_falls_silent_is_a_fault_that_names_its_test() {
        let mut results = Results::new(["a"]);
        results.take(&Line::Run("a".into()));
        results.fault("silent for 300 s".into());
        assert_eq!(
            results.faults(),
            [
                "silent for 300 s",
                "a: did not come to its end",
                "the guest did not come to its end"
            ]
        );
    }

    #[test]
    fn a_result_that_no_caller_can_expect_is_a_fault() {
        let good = "run a\nok a\nrun b\nok b\ndone\n";
        for more in ["run c\nok c", "ok a", "run a", "FAILED b: late"] {
            assert!(!faults(&format!("{good}{more}")).is_empty(), "{more}");
        }
        assert_eq!(
            faults("ok a\nrun b\nok b\ndone").len(),
            2,
            "passed, and never begun"
        );
    }
}
