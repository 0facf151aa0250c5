//! Output for people fits 80 columns, uses the width that there is, and is ASCII where the locale has no more.
//!
//! Reports of given values are checked where they are made: `Sheet::into_text` fails in a test on a line that
//! does not fit.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::{dmaspace, run};

/// The widest line of what is printed in this environment.
fn widest(arguments: &[&str], environment: &[(&str, &str)]) -> (usize, String) {
    let mut command = dmaspace(arguments);
    command.envs(environment.iter().copied());
    let (stdout, stderr, status) = run(command);
    assert_eq!((stderr.as_str(), status), ("", Some(0)), "{arguments:?}");
    let widths = stdout.lines().map(|line| line.chars().count());
    (widths.max().unwrap(), stdout)
}

/// Reports that take no time: of this machine, this process, and images of tables in `directory`.
fn reports(directory: &Path) -> Vec<Vec<String>> {
    let pid = std::process::id().to_string();
    let [one, other] = ["one.img", "other.img"].map(|name| directory.join(name));
    let [one, other] = [one.to_str().unwrap(), other.to_str().unwrap()];
    let map = "--map 0xffff80000000:12K:0x200000000:r --map 1G:1G:4G";
    let options = [
        format!("tables image {one} {map}"),
        format!("tables image {other} {map} --map 0x400000000000:32M:0x80000000 --max-leaf 4K"),
        format!("tables dump {other}"),
        format!("tables check {other}"),
        format!("tables walk {one} 0xffff80001234"),
        "check --size 4M --backing 4k --devices 1".into(),
        "devices".into(),
        "explain --machine".into(),
        format!("inspect --no-times --pid {pid}"),
        "numa".into(),
    ];
    let words = |line: String| line.split(' ').map(str::to_owned).collect();
    options.map(words).into()
}

#[test]
fn reports_fit_80_columns_and_are_ascii_where_the_locale_is() {
    let directory = tempfile::tempdir().unwrap();
    for report in reports(directory.path()) {
        let report: Vec<_> = report.iter().map(String::as_str).collect();
        for locale in ["C.UTF-8", "C"] {
            let (columns, text) = widest(&report, &[("LC_ALL", locale)]);
            assert!(columns <= 80, "{columns}:\n{text}");
            assert!(text.is_ascii() || locale != "C", "{text}");
        }
    }
}

#[test]
fn reports_use_the_columns_that_there_are() {
    let text = |columns| widest(&["explain", "--machine"], &[("COLUMNS", columns)]);
    let (narrow, narrow_text) = text("60");
    let (wide, wide_text) = text("200");
    assert!(narrow <= 60 && wide > 80, "{narrow_text}{wide_text}");
    assert!(narrow_text.lines().count() > wide_text.lines().count());
}

/// All commands that are not hidden.
fn commands(command: &clap::Command, path: &[String], all: &mut Vec<Vec<String>>) {
    all.push(path.to_vec());
    for nested in command.get_subcommands().filter(|one| !one.is_hide_set()) {
        let path = [path, &[nested.get_name().to_owned()]].concat();
        commands(nested, &path, all);
    }
}

#[test]
fn help_is_ascii_and_fits_80_columns() {
    let mut all = Vec::new();
    commands(&dmaspace_cli::command(), &[], &mut all);
    for mut path in all {
        path.push("--help".into());
        let path: Vec<_> = path.iter().map(String::as_str).collect();
        let (_, text) = widest(&path, &[]);
        assert!(text.is_ascii(), "{path:?}");
        // Examples are commands to be copied: they are not broken.
        let (prose, _) = text.split_once("Examples:\n").unwrap_or((&text, ""));
        for line in prose.lines() {
            assert!(line.chars().count() <= 80, "{path:?}: {line}");
        }
    }
}
