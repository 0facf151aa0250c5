//! Man pages and completions say all that the command line takes, and all of it is explained.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;

use clap::Command;

use common::{dmaspace, run};

/// All commands that are not hidden, by their whole names joined with `-`.
fn commands() -> Vec<(String, Command)> {
    fn add(name: &str, command: &Command, all: &mut Vec<(String, Command)>) {
        all.push((name.into(), command.clone()));
        let told = |nested: &&Command| !nested.is_hide_set();
        for nested in command.get_subcommands().filter(told) {
            add(&format!("{name}-{}", nested.get_name()), nested, all);
        }
    }
    let (mut all, mut root) = (
        Vec::new(),
        dmaspace_cli::command().disable_help_subcommand(true),
    );
    root.build();
    add("dmaspace", &root, &mut all);
    all
}

#[test]
fn every_command_and_argument_is_explained() {
    for (name, command) in commands() {
        assert!(command.get_about().is_some(), "{name}");
        for argument in command.get_arguments() {
            assert!(argument.get_help().is_some(), "{name} {argument}");
        }
    }
}

#[test]
fn every_command_has_a_page_with_its_options_and_is_completed() {
    let directory = tempfile::tempdir().unwrap();
    let written = run(dmaspace(&["manuals", directory.path().to_str().unwrap()]));
    assert_eq!(written, (String::new(), String::new(), Some(0)));
    let read = |name: String| {
        let file = directory.path().join(&name);
        fs::read_to_string(file).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let bash = read("bash-completion/completions/dmaspace.bash".into());
    for (name, command) in commands() {
        // In roff a hyphen that is typed is written `\-`.
        let page = read(format!("man/man1/{name}.1")).replace("\\-", "-");
        for option in command.get_arguments().filter_map(|one| one.get_long()) {
            let option = format!("--{option}");
            assert!(page.contains(&option), "{name} {option}");
            assert!(bash.contains(&option), "{name} {option}");
        }
    }
    for script in [
        "zsh/site-functions/_dmaspace",
        "fish/vendor_completions.d/dmaspace.fish",
    ] {
        assert!(read(script.into()).contains("balloon"));
    }
    let taken = run(dmaspace(&["manuals", "/dev/null"]));
    assert_eq!((taken.0.as_str(), taken.2), ("", Some(2)), "{}", taken.1);
}

#[test]
fn help_explains_a_command_as_its_own_option_does() {
    for command in [&[][..], &["check"], &["tables", "walk"]] {
        let of = |words: Vec<&str>| run(dmaspace(&words));
        let help = of([&["help"], command].concat());
        assert_eq!(help, of([command, &["--help"]].concat()));
        assert_eq!((help.1.as_str(), help.2), ("", Some(0)));
    }
}
