//! Looks up what the rows name.
//!
//! * An item: `iopt::Table::map`, crate first; modules between may be left out, and a crate may
//!   be named that only re-exports it.
//! * A test: `runs::join::tests::name`, or `iopt/tests/model/exclusive.rs::name` with the file; modules
//!   may be left out here too. `bench:iopt/map` is a bench target, `row:map-1/amdv1` a row of
//!   `cargo xtask bench-tables` in one format, `part:crate-graph` a part
//!   of the test command.

use std::path::Path;

use super::sources::{Crate, Test, Workspace};
use crate::parts::PARTS;

/// How many re-exports may follow one another; no honest path has more.
const EXPORTS: usize = 8;

/// Checks that there is a public item of this name.
pub(crate) fn item(workspace: &Workspace, name: &str) -> Result<(), String> {
    let path: Vec<_> = name.trim_end_matches("()").split("::").collect();
    let found = match path.split_first() {
        Some((first, rest)) if !rest.is_empty() => workspace
            .find(first)
            .is_some_and(|member| has_item(workspace, member, rest, EXPORTS)),
        _ => {
            return Err(format!(
                "`{name}` is no path of an item; it begins with the crate"
            ));
        }
    };
    if found {
        Ok(())
    } else {
        Err(format!("there is no public item `{name}`"))
    }
}

fn has_item(workspace: &Workspace, member: &Crate, path: &[&str], exports: usize) -> bool {
    let Some((name, before)) = path.split_last() else {
        return false;
    };
    let here = member.items.iter().any(|item| {
        let modules = match &item.owner {
            None => Some(before),
            Some(owner) => match before.split_last() {
                Some((last, modules)) if last == owner => Some(modules),
                _ => None,
            },
        };
        item.name == *name && modules.is_some_and(|modules| is_part(modules, &item.modules))
    });
    if here {
        return true;
    }
    let Some(exports) = exports.checked_sub(1) else {
        return false;
    };
    member.exports.iter().any(|export| {
        (0..path.len()).any(|at| {
            // The path as far as the module of the export, then what it exports.
            if !is_part(&path[..at], &export.modules) {
                return false;
            }
            let rest = match &export.name {
                Some(name) if name == path[at] => &path[at + 1..],
                Some(_) => return false,
                None => &path[at..],
            };
            let mut target: Vec<&str> = export.path.iter().map(String::as_str).collect();
            target.extend(rest);
            let Some((first, rest)) = target.split_first() else {
                return false;
            };
            match workspace.find(first) {
                Some(other) => has_item(workspace, other, rest, exports),
                None => {
                    let words = ["crate", "self", "super"];
                    let inner = target.iter().position(|word| !words.contains(word));
                    // A path that begins with a module of its own crate says nothing new
                    // unless the export gives another name or leaves a module out.
                    inner.is_some_and(|from| {
                        target[from..] != *path
                            && has_item(workspace, member, &target[from..], exports)
                    })
                }
            }
        })
    })
}

/// Checks that there is a test, bench or part of this name, and that it runs.
pub(crate) fn test(workspace: &Workspace, name: &str) -> Result<(), String> {
    if let Some(bench) = name.strip_prefix("bench:") {
        return found(has_bench(workspace, bench), "bench", name);
    }
    if let Some(row) = name.strip_prefix("row:") {
        // A row of `cargo xtask bench-tables`, and the format in which it is looked at.
        let known = row.split_once('/').is_some_and(|(row, format)| {
            [row, format]
                .iter()
                .all(|word| workspace.measured.contains(*word))
        });
        return found(known, "row", name);
    }
    if let Some(part) = name.strip_prefix("part:") {
        return found(PARTS.iter().any(|p| p.name == part), "part", name);
    }
    let tests = match name.split_once(".rs::") {
        Some((file, path)) => tests_in_file(workspace, file, path),
        None => match name.split_once("::") {
            Some((member, path)) => workspace
                .find(member)
                .map_or_else(Vec::new, |member| tests(member, None, path)),
            None => Vec::new(),
        },
    };
    if !tests.is_empty() && tests.iter().all(|test| test.ignored) {
        return Err(format!(
            "the test `{name}` is marked #[ignore]: it shows nothing"
        ));
    }
    found(!tests.is_empty(), "test", name)
}

fn found(found: bool, what: &str, name: &str) -> Result<(), String> {
    if found {
        Ok(())
    } else {
        Err(format!("there is no {what} `{name}`"))
    }
}

fn has_bench(workspace: &Workspace, name: &str) -> bool {
    match name.split_once('/') {
        Some((member, bench)) => workspace
            .find(member)
            .is_some_and(|member| member.benches.contains(bench)),
        None => workspace
            .crates
            .iter()
            .any(|member| member.benches.contains(name)),
    }
}

fn tests_in_file<'a>(workspace: &'a Workspace, file: &str, path: &str) -> Vec<&'a Test> {
    let file = file.strip_prefix("crates/").unwrap_or(file);
    let Some((member, file)) = file.split_once('/') else {
        return Vec::new();
    };
    let file = format!("{file}.rs");
    workspace.find(member).map_or_else(Vec::new, |member| {
        tests(member, Some(Path::new(&file)), path)
    })
}

fn tests<'a>(member: &'a Crate, file: Option<&Path>, path: &str) -> Vec<&'a Test> {
    let path: Vec<_> = path.split("::").collect();
    let Some((name, modules)) = path.split_last() else {
        return Vec::new();
    };
    member
        .tests
        .iter()
        .filter(|test| test.name == *name && file.is_none_or(|file| test.file == file))
        .filter(|test| {
            // A module that a macro makes is known only by its word among the arguments.
            let plain = modules
                .iter()
                .filter(|module| {
                    test.modules.iter().any(|known| known == **module)
                        || !member.macro_word(&test.file, module)
                })
                .copied();
            is_part(&plain.collect::<Vec<_>>(), &test.modules)
        })
        .collect()
}

/// True when `part` is `whole` with some words left out.
fn is_part(part: &[&str], whole: &[String]) -> bool {
    let mut whole = whole.iter();
    part.iter().all(|word| whole.any(|other| other == word))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIBRARY: &str = r#"
        pub use inner::{Table, Table as Renamed};
        pub use lower::*;
        pub mod inner {
            pub struct Table { pub root: u64, hidden: u64 }
            impl Table {
                pub fn map(&self) {}
                fn helper(&self) {}
                pub(crate) fn nearly(&self) {}
            }
            pub trait Unit { const WIDTH: u32; fn flush(&self); }
            pub enum Error { Overlap }
            fn private() {}
        }
        bitflags! { pub struct Prot: u32 { const READ = 1; } }
        #[cfg(test)]
        mod tests {
            pub fn helper() {}
            #[test]
            fn plain() {}
            #[test]
            #[ignore = "slow"]
            fn slow() {}
            fn no_test() {}
            proptest! {
                /// A property.
                #[test]
                fn property(x in 0..3) {}
                fn no_property(x in 0..3) {}
            }
            macro_rules! suite {
                ($format:ident: $($name:ident)*) => {
                    mod $format { $( #[test] fn $name() {} )* #[test] fn always() {} }
                };
            }
            suite!(amdv1: maps unmaps);
        }
    "#;

    fn workspace() -> Workspace {
        Workspace {
            measured: ["map-1", "amdv1"].map(str::to_owned).into(),
            crates: vec![
                Crate::from_text("upper", "src/lib.rs", LIBRARY),
                Crate::from_text("lower", "src/lib.rs", "pub fn pin() {} pub use upper::*;"),
            ],
        }
    }

    fn items(names: &[&str]) -> Vec<bool> {
        names
            .iter()
            .map(|name| item(&workspace(), name).is_ok())
            .collect()
    }

    fn tests_exist(names: &[&str]) -> Vec<bool> {
        names
            .iter()
            .map(|name| test(&workspace(), name).is_ok())
            .collect()
    }

    #[test]
    fn public_items_are_found_with_and_without_their_modules() {
        let good = [
            "upper::inner::Table::map",
            "upper::Table::map",
            "upper::Table::map()",
            "upper::Table::root",
            "upper::Renamed::map",
            "upper::Unit::flush",
            "upper::Unit::WIDTH",
            "upper::Error::Overlap",
            "upper::Prot",
            "upper::pin",
            "lower::Table",
        ];
        assert_eq!(items(&good), [true; 11]);
    }

    #[test]
    fn items_that_are_private_absent_or_elsewhere_fail() {
        let bad = [
            "upper::Table::unmap",
            "upper::Table::helper",
            "upper::Table::nearly",
            "upper::Table::hidden",
            "upper::inner::private",
            "upper::tests::helper",
            "upper::other::Table",
            "upper::map",
            "absent::Table",
            "upper",
            "",
        ];
        assert_eq!(items(&bad), [false; 11]);
    }

    #[test]
    fn tests_are_found_in_modules_files_and_macros() {
        let good = [
            "upper::tests::plain",
            "upper::plain",
            "upper/src/lib.rs::plain",
            "crates/upper/src/lib.rs::tests::plain",
            "upper::tests::property",
            "upper::tests::amdv1::maps",
            "upper::tests::amdv1::always",
            "part:crate-graph",
            "row:map-1/amdv1",
        ];
        assert_eq!(tests_exist(&good), [true; 9]);
    }

    #[test]
    fn tests_that_do_not_run_or_are_none_fail() {
        let bad = [
            "upper::tests::no_test",
            "upper::tests::no_property",
            "upper::tests::helper",
            "upper::other::plain",
            "upper::tests::absent",
            "upper/src/other.rs::plain",
            "absent::tests::plain",
            "upper::tests::vtd::always",
            "bench:map",
            "part:absent",
            "row:map-1",
            "row:map-1/absent",
            "",
        ];
        assert_eq!(tests_exist(&bad), [false; 13]);
        let ignored = test(&workspace(), "upper::tests::slow").unwrap_err();
        assert!(ignored.contains("#[ignore]"), "{ignored}");
    }
}
