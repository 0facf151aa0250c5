//! The command.

use std::io::{self, IsTerminal as _};

use crate::draw::sheet::Paint;
use crate::stop::Stop;
use crate::target::Target;
use crate::{exit, fail, json, print, refuse, say, sentence};

use super::progress::Progress;
use super::verdict::Verdict;
use super::{JobError, MapArgs, MapReport, svg, text};

/// `dmaspace map`.
pub(crate) fn run(args: &MapArgs, verbose: bool) -> u8 {
    let job = match args.job() {
        Ok(job) => job,
        Err(error) => return refuse(&error),
    };
    let target = match args.svg.as_deref().map(Target::new).transpose() {
        Ok(target) => target,
        Err(error) => return refuse(&error),
    };
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let bar = io::stderr().is_terminal() && !verbose;
    let (result, asked) = stop.shielded(|| {
        let mut progress = Progress::new(stop.clone(), bar);
        job.run(&mut progress)
    });
    let report = match (result, asked) {
        (Err(JobError::Interrupted), _) | (Ok(_), true) => {
            // Whoever asked it to stop means it, even if the job was done by then.
            return fail(&JobError::Interrupted, exit::INTERRUPTED);
        }
        (Err(error), true) => {
            // A signal makes the kernel give up, too: it adds fewer huge pages than asked for.
            say(&format!("interrupted: {}", sentence(&error)));
            return exit::INTERRUPTED;
        }
        (Err(error), false) if error.is_input() => return fail(&error, exit::INPUT),
        (Err(error), false) => return fail(&error, exit::WRONG),
        (Ok(report), false) => report,
    };
    tell(args, target, &stop, &report)
}

/// Writes what was found. A wrong byte outranks a full disk in the exit status.
fn tell(args: &MapArgs, target: Option<Target>, stop: &Stop, report: &MapReport) -> u8 {
    let drawn = target.map_or(Ok(()), |target| target.write(&svg::draw(report), stop));
    let text = if args.json {
        match json(report) {
            Ok(json) => json,
            Err(error) => return fail(&error, exit::WRONG),
        }
    } else {
        text::write(report, Paint::for_stdout())
    };
    let mut written = true;
    for result in [drawn, print(&text)] {
        if let Err(error) = result {
            refuse(&error);
            written = false;
        }
    }
    status(report, written)
}

/// The exit status of a job that came to its end.
fn status(report: &MapReport, written: bool) -> u8 {
    match Verdict::of(report) {
        Verdict::Wrong(_) => exit::WRONG,
        Verdict::Right | Verdict::Unchecked(_) if !written => exit::INPUT,
        Verdict::Right | Verdict::Unchecked(_) => exit::RIGHT,
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    #[test]
    fn a_wrong_byte_outranks_a_full_disk() {
        let (right, wrong) = (samples::huge(), samples::synthetic());
        assert_eq!(status(&right, true), exit::RIGHT);
        assert_eq!(status(&right, false), exit::INPUT);
        assert_eq!(status(&wrong, true), exit::WRONG);
        assert_eq!(status(&wrong, false), exit::WRONG);
        let unchecked = samples::unchecked();
        assert_eq!(status(&unchecked, true), exit::RIGHT);
        assert_eq!(status(&unchecked, false), exit::INPUT);
    }
}
