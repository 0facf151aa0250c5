//! `docs/unsafe.md` against the sources: every file with `unsafe`, how often, and which tests watch it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail};
use walkdir::WalkDir;

use crate::{cargo::Repository, parts::Outcome};

const FILE: &str = "docs/unsafe.md";

/// The part `unsafe` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let root = repository.root.as_path();
    let text = fs::read_to_string(root.join(FILE)).with_context(|| format!("no {FILE}"))?;
    let sources = sources(root)?;
    let faults = faults(&text, &sources);
    if !faults.is_empty() {
        bail!(
            "{FILE} (faults: {})\n  {}",
            faults.len(),
            faults.join("\n  ")
        );
    }
    let own = sources.iter().filter(|(path, _)| is_own(path));
    let counts = own.map(|(_, text)| count(text));
    println!("`unsafe` in {} places", counts.sum::<usize>());
    Ok(Outcome::Passed)
}

/// The sources of the crates below `crates/`: path from the root, text. Tests too, whose names are looked for.
fn sources(root: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let crates = WalkDir::new(root.join("crates")).into_iter();
    let mut found = BTreeMap::new();
    for file in crates.filter_entry(|entry| entry.file_name() != "target") {
        let path = file?.into_path();
        if path.extension().is_some_and(|end| end == "rs") {
            let name = path.strip_prefix(root)?.display().to_string();
            found.insert(name, fs::read_to_string(&path)?);
        }
    }
    Ok(found)
}

/// Whether it is a source of the library or program itself, and not of a test, bench or example.
fn is_own(path: &str) -> bool {
    path.split('/').nth(2) == Some("src")
}

/// How often the code says `unsafe`. Comments do not count.
fn count(source: &str) -> usize {
    let code = source.lines().map(|line| line.split("//").next());
    let words = code
        .flatten()
        .flat_map(|line| line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')));
    words.filter(|word| *word == "unsafe").count()
}

/// A row of a table: the file, the number, the tests.
fn row(line: &str) -> Option<(&str, Option<usize>, Vec<&str>)> {
    let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
    let file = cells.next()?.strip_suffix('`')?;
    let places = cells.next()?.parse().ok();
    let tests = cells.nth(2)?.split('`').skip(1).step_by(2).collect();
    Some((file, places, tests))
}

/// What is not as the document says, a sentence each.
fn faults(text: &str, sources: &BTreeMap<String, String>) -> Vec<String> {
    let mut faults = Vec::new();
    let mut listed = BTreeMap::new();
    for (file, places, tests) in text.lines().filter_map(row) {
        if listed.insert(file, places).is_some() {
            faults.push(format!("{file} has two rows"));
        }
        for test in tests {
            let head = format!("fn {test}(");
            if !sources.values().any(|source| source.contains(&head)) {
                faults.push(format!("{file}: there is no test {test}"));
            }
        }
    }
    let mut libraries: BTreeMap<&str, bool> = BTreeMap::new();
    for (path, source) in sources.iter().filter(|(path, _)| is_own(path)) {
        let found = count(source);
        let here = libraries.entry(path.split('/').nth(1).unwrap_or_default());
        *here.or_default() |= found > 0;
        match listed.remove(path.as_str()) {
            None if found == 0 => {}
            None => faults.push(format!("{path} has {found} places and no row")),
            Some(said) if said == Some(found) && found > 0 => {}
            Some(said) => {
                let said = said.map_or("no number".into(), |said| said.to_string());
                faults.push(format!(
                    "{path} has {found} places, and its row says {said}"
                ));
            }
        }
    }
    faults.extend(listed.keys().map(|file| format!("there is no {file}")));
    for (name, has_some) in libraries {
        // A program alone, as nostd-check, has its whole in the table.
        let Some(library) = sources.get(&format!("crates/{name}/src/lib.rs")) else {
            continue;
        };
        let wanted = if has_some { "deny" } else { "forbid" };
        let line = format!("#![{wanted}(unsafe_code)]");
        if !library.lines().any(|other| other == line) {
            faults.push(format!("crates/{name}/src/lib.rs lacks {line}"));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_counts_in_code_only() {
        let source = "// unsafe\nunsafe impl Send for X {} // unsafe\nlet a = unsafe { b };\n\
            #![deny(unsafe_code)]\nunsafe_op();";
        assert_eq!(count(source), 2);
    }

    #[test]
    fn what_is_not_as_the_document_says_is_named() {
        let source = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        let sources = BTreeMap::from([
            source("crates/a/src/lib.rs", "#![deny(unsafe_code)]\n"),
            source("crates/a/src/sys.rs", "unsafe { x }\nunsafe { y }"),
            source("crates/a/tests/t.rs", "fn holds() {}\nunsafe { }"),
            source("crates/b/src/lib.rs", "#![forbid(unsafe_code)]\n"),
        ]);
        let table =
            |rows: &str| faults(&format!("| file | places | a | b | c |\n{rows}"), &sources);
        let right = "| `crates/a/src/sys.rs` | 2 | why | on | `holds` |";
        assert_eq!(table(right), Vec::<String>::new());
        assert_eq!(table(""), ["crates/a/src/sys.rs has 2 places and no row"]);
        assert_eq!(
            table("| `crates/a/src/sys.rs` | 3 | why | on | `absent` |"),
            [
                "crates/a/src/sys.rs: there is no test absent",
                "crates/a/src/sys.rs has 2 places, and its row says 3"
            ]
        );
        let gone = format!("{right}\n| `crates/a/src/gone.rs` | 1 | | | |");
        assert_eq!(table(&gone), ["there is no crates/a/src/gone.rs"]);
        let mut changed = sources.clone();
        changed.insert("crates/b/src/lib.rs".into(), String::new());
        assert_eq!(
            faults(right, &changed),
            ["crates/b/src/lib.rs lacks #![forbid(unsafe_code)]"]
        );
    }
}
