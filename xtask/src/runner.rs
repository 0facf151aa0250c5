//! Runs the parts one after the other and sums them up.
//!
//! A failure does not stop the run: one look at the summary shows everything that is wrong.
//! A part whose needs are not met is "not run", which fails only where it would stay unseen: on
//! a CI machine.

use std::{
    env,
    fmt::Write as _,
    time::{Duration, Instant},
};

use anyhow::bail;
use clap::Args;

use crate::{
    cargo::Repository,
    host::{Host, Need},
    parts::{Group, Outcome, Part},
};

/// The options of `cargo xtask test`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// Install missing Debian packages with apt-get (as root); always on when CI is set.
    #[arg(long)]
    pub(crate) install: bool,
    /// Run the rigs as well: QEMU, guests, kernels and other programs judge ours.
    #[arg(long)]
    pub(crate) all: bool,
    /// Stop at the first part that fails.
    #[arg(long)]
    pub(crate) fail_fast: bool,
    /// Run only this part, with or without a rig; may be given several times.
    #[arg(long, value_name = "PART")]
    pub(crate) only: Vec<String>,
}

/// How a part ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Ok,
    Failed(String),
    NotRun(String),
}

/// One line of the summary.
struct Line {
    name: &'static str,
    group: Group,
    budget: Duration,
    took: Duration,
    state: State,
}

/// Runs the chosen parts; true when all is well.
pub(crate) fn run(
    options: &Options,
    parts: &[Part],
    repository: &Repository,
    host: &mut dyn Host,
) -> anyhow::Result<bool> {
    let ci = in_ci();
    let chosen = choose(parts, options)?;
    let mut lines = Vec::new();
    let unmet = prepare(&chosen, options.install || ci, host);
    let begun = Instant::now();
    let mut stopped = false;
    for (part, unmet) in chosen.iter().zip(unmet) {
        let start = Instant::now();
        let state = if stopped {
            State::NotRun("an earlier part failed".into())
        } else if let Some(reason) = unmet {
            State::NotRun(reason)
        } else {
            println!("\n== {} ==", part.name);
            match (part.run)(repository) {
                Ok(Outcome::Passed) => State::Ok,
                Ok(Outcome::NotRun(reason)) => State::NotRun(reason),
                Err(error) => {
                    println!("{error:#}");
                    // The first line of it.
                    State::Failed(format!("{error:#}").lines().take(1).collect())
                }
            }
        };
        stopped |= options.fail_fast && matches!(state, State::Failed(_));
        lines.push(Line {
            name: part.name,
            group: part.group,
            budget: part.budget,
            took: start.elapsed(),
            state,
        });
    }
    print!("\n{}", summary(&lines, begun.elapsed()));
    if options.only.is_empty() && !options.all {
        print!("{}", left_out(parts, host));
    }
    let well = passes(&lines, ci);
    if !well && lines.iter().all(|l| !matches!(l.state, State::Failed(_))) {
        println!("Failed: CI is set, and a part that must run did not.");
    }
    Ok(well)
}

/// True if `CI` is set.
pub(crate) fn in_ci() -> bool {
    env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false")
}

/// The parts named by `--only`, or all that run without a rig, or all.
fn choose<'a>(parts: &'a [Part], options: &Options) -> anyhow::Result<Vec<&'a Part>> {
    let only = &options.only;
    let known = |name: &&String| parts.iter().any(|part| part.name == **name);
    if let Some(unknown) = only.iter().find(|name| !known(name)) {
        let names: Vec<_> = parts.iter().map(|part| part.name).collect();
        bail!(
            "there is no part `{unknown}`; the parts are {}",
            names.join(", ")
        );
    }
    let wanted = |part: &&Part| {
        if only.is_empty() {
            options.all || part.group == Group::Basic
        } else {
            only.iter().any(|name| name == part.name)
        }
    };
    Ok(parts.iter().filter(wanted).collect())
}

/// Parts that `--all` would add, and the packages that it would need first.
fn left_out(parts: &[Part], host: &mut dyn Host) -> String {
    let rigs: Vec<_> = parts.iter().filter(|p| p.group == Group::Rig).collect();
    let names: Vec<_> = rigs.iter().map(|part| part.name).collect();
    let minutes = rigs
        .iter()
        .map(|part| part.budget)
        .sum::<Duration>()
        .as_secs()
        / 60;
    let missing = host.missing(&rigs.iter().flat_map(|part| packages(part)).collect());
    let mut text = format!(
        "  `cargo xtask test --all` adds, in about {minutes} minutes: {}\n",
        names.join(", ")
    );
    if !missing.is_empty() {
        let missing = list(missing.into_iter());
        let _ = writeln!(
            text,
            "  it needs packages that `--install` installs: {missing}"
        );
    }
    text
}

/// Sees to what the parts need. For each part: why it cannot run, if it cannot.
fn prepare(parts: &[&Part], install: bool, host: &mut dyn Host) -> Vec<Option<String>> {
    let needed = parts.iter().flat_map(|part| packages(part)).collect();
    let mut missing = host.missing(&needed);
    if !missing.is_empty() {
        let names = list(missing.iter().copied());
        if install {
            println!("== packages: {names} ==");
            if let Err(error) = host.install(&missing) {
                println!("{error:#}");
            }
            missing = host.missing(&needed);
        } else {
            println!(
                "!! Missing packages: {names}\n!! Parts that need them will not run. \
                 Install them with `cargo xtask test --install` (as root)."
            );
        }
    }
    parts
        .iter()
        .map(|part| {
            let lacking = list(packages(part).filter(|p| missing.contains(p)));
            if !lacking.is_empty() {
                return Some(format!("missing packages: {lacking}"));
            }
            part.needs.iter().find_map(|need| match need {
                Need::Subcommand(name, remedy) if !host.has_subcommand(name) => {
                    Some(format!("`cargo {name}` is missing: {remedy}"))
                }
                _ => None,
            })
        })
        .collect()
}

/// Missing packages of the part `name`, for a command that does the same by itself, before it builds for minutes.
/// It may run all the same, on another distribution, or with programs of one's own.
pub(crate) fn lacking(name: &str, parts: &[Part], host: &mut dyn Host) -> Option<String> {
    let part = parts.iter().find(|part| part.name == name)?;
    let missing = host.missing(&packages(part).collect());
    let names = list(missing.iter().copied());
    (!names.is_empty()).then(|| {
        format!(
            "!! Missing packages: {names}\n!! `cargo xtask test --install --only {name}` installs them (as root)."
        )
    })
}

fn list(packages: impl Iterator<Item = &'static str>) -> String {
    packages.collect::<Vec<_>>().join(" ")
}

fn packages(part: &Part) -> impl Iterator<Item = &'static str> {
    part.needs.iter().filter_map(|need| match need {
        Need::Package(name) => Some(*name),
        Need::Subcommand(..) => None,
    })
}

/// True when nothing failed and, on a CI machine, nothing was left out.
fn passes(lines: &[Line], ci: bool) -> bool {
    lines.iter().all(|line| match line.state {
        State::Ok => true,
        State::Failed(_) => false,
        State::NotRun(_) => !ci,
    })
}

fn summary(lines: &[Line], total: Duration) -> String {
    let mut text = String::new();
    let mut counts = [0; 3];
    for line in lines {
        let (state, count) = match &line.state {
            State::Ok => ("ok", 0),
            State::Failed(_) => ("FAILED", 1),
            State::NotRun(_) => ("not run", 2),
        };
        counts[count] += 1;
        let (took, budget) = (line.took.as_secs_f64(), line.budget.as_secs());
        let _ = write!(
            text,
            "  {state:<7} {:<12} {took:>7.1} s  (budget {budget} s)",
            line.name
        );
        if matches!(line.state, State::Ok) && line.took > line.budget {
            text.push_str(", over budget");
        }
        if let State::Failed(reason) | State::NotRun(reason) = &line.state {
            let _ = write!(text, ": {reason}");
        }
        text.push('\n');
    }
    for group in Group::ALL {
        let took: Duration = of_group(lines, group).map(|line| line.took).sum();
        if of_group(lines, group).next().is_some() {
            let (took, budget) = (took.as_secs_f64(), group.budget().as_secs());
            let name = group.name();
            let _ = writeln!(text, "  {name:<20} {took:>7.1} s  (budget {budget} s)");
        }
    }
    let [ok, failed, not_run] = counts;
    let _ = writeln!(
        text,
        "  total: {ok} ok, {failed} failed, {not_run} not run, {:.1} s",
        total.as_secs_f64()
    );
    text
}

fn of_group(lines: &[Line], group: Group) -> impl Iterator<Item = &Line> {
    lines.iter().filter(move |line| line.group == group)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A machine that has what a test says.
    struct Machine {
        packages: BTreeSet<&'static str>,
        installs: bool,
        asked: usize,
    }

    impl Host for Machine {
        fn missing(&mut self, packages: &BTreeSet<&'static str>) -> BTreeSet<&'static str> {
            packages.difference(&self.packages).copied().collect()
        }
        fn install(&mut self, packages: &BTreeSet<&'static str>) -> anyhow::Result<()> {
            self.asked += 1;
            if !self.installs {
                bail!("no network");
            }
            self.packages.extend(packages);
            Ok(())
        }
        fn has_subcommand(&mut self, name: &str) -> bool {
            name != "absent"
        }
    }

    fn part(name: &'static str, needs: &'static [Need]) -> Part {
        Part {
            name,
            group: Group::Basic,
            budget: Duration::from_secs(1),
            needs,
            run: |_| Ok(Outcome::Passed),
        }
    }

    fn line(state: State) -> Line {
        Line {
            name: "tests",
            group: Group::Basic,
            budget: Duration::from_secs(120),
            took: Duration::from_millis(31_200),
            state,
        }
    }

    fn machine(installs: bool) -> Machine {
        Machine {
            packages: BTreeSet::new(),
            installs,
            asked: 0,
        }
    }

    #[test]
    fn a_part_whose_package_is_missing_does_not_run_and_nothing_is_installed_unasked() {
        let parts = [part("a", &[Need::Package("qemu")]), part("b", &[])];
        let mut host = machine(true);
        let unmet = prepare(&[&parts[0], &parts[1]], false, &mut host);
        assert_eq!(unmet, [Some("missing packages: qemu".to_owned()), None]);
        let told = lacking("a", &parts, &mut host).unwrap();
        assert!(told.contains("packages: qemu\n"), "{told}");
        assert!(told.contains("--install --only a`"), "{told}");
        assert_eq!(lacking("b", &parts, &mut host), None);
        host.packages.insert("qemu");
        assert_eq!(lacking("a", &parts, &mut host), None);
        assert_eq!(host.asked, 0);
    }

    #[test]
    fn packages_are_installed_once_and_a_failure_leaves_the_part_not_run() {
        let a = part("a", &[Need::Package("qemu")]);
        let mut host = machine(true);
        assert_eq!(prepare(&[&a], true, &mut host), [None]);
        assert_eq!(prepare(&[&a], true, &mut host), [None]);
        assert_eq!(host.asked, 1);
        let unmet = prepare(&[&a], true, &mut machine(false));
        assert_eq!(unmet, [Some("missing packages: qemu".to_owned())]);
    }

    #[test]
    fn a_missing_subcommand_names_its_remedy() {
        let a = part("a", &[Need::Subcommand("absent", "cargo install absent")]);
        let unmet = prepare(&[&a], false, &mut machine(false));
        assert_eq!(
            unmet[0].as_deref(),
            Some("`cargo absent` is missing: cargo install absent")
        );
    }

    #[test]
    fn a_failure_fails_the_run_and_a_part_left_out_fails_it_on_ci_only() {
        let failed = || State::Failed("one test failed".into());
        let left_out = || State::NotRun("missing packages: qemu".into());
        assert!(passes(&[line(State::Ok)], true));
        assert!(!passes(&[line(State::Ok), line(failed())], false));
        assert!(passes(&[line(left_out())], false));
        assert!(!passes(&[line(left_out())], true));
    }

    #[test]
    fn each_part_has_its_line_with_time_and_budget() {
        let text = summary(
            &[
                line(State::Ok),
                line(State::Failed("x".into())),
                line(State::NotRun("y".into())),
            ],
            Duration::from_secs(90),
        );
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "  ok      tests           31.2 s  (budget 120 s)");
        assert_eq!(
            lines[1],
            "  FAILED  tests           31.2 s  (budget 120 s): x"
        );
        assert_eq!(
            lines[2],
            "  not run tests           31.2 s  (budget 120 s): y"
        );
        assert_eq!(lines[3], "  without rigs            93.6 s  (budget 540 s)");
        assert_eq!(lines[4], "  total: 1 ok, 1 failed, 1 not run, 90.0 s");
    }

    #[test]
    fn rigs_run_when_they_are_asked_for_and_the_summary_names_them() {
        let rig = Part {
            group: Group::Rig,
            budget: Duration::from_secs(180),
            ..part("rig", &[Need::Package("qemu")])
        };
        let parts = [part("a", &[]), part("b", &[]), rig];
        let chosen = |all, only: &[&str]| {
            let only = only.iter().map(|&name| name.to_owned()).collect();
            let options = Options {
                all,
                only,
                ..Options::default()
            };
            let parts = choose(&parts, &options).map_err(|error| error.to_string());
            parts.map(|parts| parts.iter().map(|part| part.name).collect::<Vec<_>>())
        };
        assert_eq!(chosen(false, &[]).unwrap(), ["a", "b"]);
        assert_eq!(chosen(true, &[]).unwrap(), ["a", "b", "rig"]);
        assert_eq!(chosen(false, &["rig", "b"]).unwrap(), ["b", "rig"]);
        assert_eq!(
            chosen(false, &["c"]).unwrap_err(),
            "there is no part `c`; the parts are a, b, rig"
        );
        let text = left_out(&parts, &mut machine(false));
        assert!(text.contains("in about 3 minutes: rig\n"), "{text}");
        assert!(text.contains("--install` installs: qemu\n"), "{text}");
    }
}
