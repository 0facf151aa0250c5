//! The other implementations: the one place where their modules are named.

use crate::peers::field::{Contest, Entrant, Who};
use crate::peers::linux::{Gathering, Programs};
use crate::peers::{crates, limit};

/// Linux's tables of a format, and whether they note leaf by leaf what is to be flushed, so that a
/// lazy domain is another thing. Linux has nothing for RISC-V's second stage.
fn of_linux(format: &str) -> (&'static [&'static str], bool) {
    match format {
        "x86-64" => (&["x86-64"], false),
        "vtd-ss" => (&["vtd-ss"], false),
        "amdv1" => (&["amdv1"], false),
        "riscv" => (&["riscv", "riscv-svnapot"], false),
        "arm-s1-4k" => (&["arm-s1-4k"], true),
        "arm-s1-16k" => (&["arm-s1-16k"], true),
        "arm-s1-64k" => (&["arm-s1-64k"], true),
        "arm-s2-4k" => (&["arm-s2-4k"], true),
        "armv7s" => (&["armv7"], true),
        "dart1" => (&["dart1"], true),
        "dart2" => (&["dart2"], true),
        _ => (&[], false),
    }
}

/// Everybody but us who does the format of this contest. The loop that is the machine's limit stands
/// beside every format, in its own sizes; Linux beside those that it has; foreign crates beside the reference only.
pub(crate) fn beside(contest: &Contest, linux: Option<&Programs>) -> anyhow::Result<Vec<Entrant>> {
    let mut all: Vec<Entrant> = vec![(Who::Limit, limit::beside(&contest.geometry()?))];
    if contest.reference {
        all.extend(
            crates::subjects()
                .into_iter()
                .map(|subject| (Who::Crate, subject)),
        );
    }
    if let Some(programs) = linux {
        let (tables, notes) = of_linux(contest.id);
        for table in tables {
            for (gathering, wanted) in [(Gathering::Strict, true), (Gathering::Queued, notes)] {
                if !wanted {
                    continue;
                }
                match programs.subjects(table, gathering, false) {
                    Ok(subjects) => {
                        let boxed = subjects.into_iter().map(|linux| Box::new(linux) as _);
                        all.extend(boxed.map(|linux| (Who::Linux, linux)));
                    }
                    // The others are measured all the same.
                    Err(error) => eprintln!("LINUX'S {table} IS NOT MEASURED: {error:#}"),
                }
            }
        }
    }
    Ok(all)
}
