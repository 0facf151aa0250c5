//! The command: signals, progress, output, exit status.

use std::io::{self, IsTerminal as _, Write as _};
use std::ops::ControlFlow;

use super::report::CheckReport;
use super::{CheckArgs, CheckError, Step, report_file, text};
use crate::draw::sheet::Paint;
use crate::json::json;
use crate::output::{exit, fail, print, refuse};
use crate::stop::Stop;
use crate::target::Target;

/// `dmaspace check`.
pub(crate) fn run(args: &CheckArgs, verbose: bool) -> u8 {
    let job = match args.job() {
        Ok(job) => job,
        Err(error) => return refuse(&error),
    };
    // Looked at before the check, which would be in vain.
    let target = match args.report.as_deref().map(Target::new).transpose() {
        Ok(target) => target,
        Err(error) => return refuse(&error),
    };
    let stop = match Stop::on_signals() {
        Ok(stop) => stop,
        Err(error) => return fail(&error, exit::WRONG),
    };
    let shown = io::stderr().is_terminal() && !verbose;
    let (result, asked) = stop.shielded(|| {
        let mut last = None;
        let result = job.run(&mut |step| {
            if shown && last.replace(step) != Some(step) {
                let _ = write!(io::stderr(), "\r\x1b[K{} …", step.name());
            }
            match stop.is_asked() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        if shown {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
        result
    });
    let error = match result {
        Ok(report) if !asked => return tell(args, target, &stop, &report),
        // The signal counts, even if everything was done by then.
        Ok(_) => CheckError::Interrupted(Step::Times),
        Err(error) => error,
    };
    match error {
        CheckError::Interrupted(_) => fail(&error, exit::INTERRUPTED),
        // A signal makes the kernel give up, too.
        error if asked => {
            crate::output::say(&format!("interrupted: {}", crate::output::sentence(&error)));
            exit::INTERRUPTED
        }
        error if error.is_input() => fail(&error, exit::INPUT),
        error => fail(&error, exit::WRONG),
    }
}

/// Writes what was found.
fn tell(args: &CheckArgs, target: Option<Target>, stop: &Stop, report: &CheckReport) -> u8 {
    let text = match args.json {
        true => json(report).map_err(Into::into),
        false => Ok(text::write(report, Paint::for_stdout())),
    };
    let told = text.and_then(|text| print(&text));
    let sent = target.map_or(Ok(()), |target| {
        let file = report_file::write(report)?;
        target.write(&file, stop)?;
        let name = args.report.as_deref().unwrap_or("".as_ref()).display();
        print(&format!("\nwritten to {name}:\n{file}"))
    });
    let mut written = true;
    for result in [told, sent] {
        if let Err(error) = result {
            refuse(&error);
            written = false;
        }
    }
    status(report, written)
}

/// The exit status of a check that came to its end: a wrong byte outranks a full disk.
fn status(report: &CheckReport, written: bool) -> u8 {
    match (report.is_right(), written) {
        (false, _) => exit::WRONG,
        (true, false) => exit::INPUT,
        (true, true) => exit::RIGHT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::report::{DmaReport, Done};

    #[test]
    fn a_wrong_byte_outranks_a_full_disk() {
        let right = CheckReport::default();
        let mut wrong = right.clone();
        wrong.dma = Some(DmaReport {
            wrong_bytes: 1,
            ..DmaReport::default()
        });
        let mut failed = right.clone();
        failed.steps.push(Done::default());
        let mut left = right.clone();
        left.left.table_pages = 1;
        assert_eq!(status(&right, true), exit::RIGHT);
        assert_eq!(status(&right, false), exit::INPUT);
        for wrong in [wrong, failed, left] {
            assert_eq!(status(&wrong, true), exit::WRONG);
            assert_eq!(status(&wrong, false), exit::WRONG);
        }
    }
}
