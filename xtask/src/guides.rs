//! The documents: what they show of programs is in the programs, and what they link to is there.
//!
//! A block of code that comes from a file names it behind the language, as in ` ```rust examples/nvme.rs `.
//! Its lines are lines of the file, one after the other; only the indentation of all of them may differ,
//! and a line that is `// ...` stands for any number of lines.

use std::fs;
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use crate::cargo::Repository;

const ELLIPSIS: &str = "// ...";

fn root() -> PathBuf {
    Repository::find().unwrap().root
}

/// Every document: those of the repository, but for what is built and what is hidden.
fn documents() -> Vec<(PathBuf, String)> {
    let unwanted = |name: &str| name == "target" || (name.starts_with('.') && name.len() > 1);
    let all = WalkDir::new(root()).into_iter();
    all.filter_entry(|entry| !unwanted(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.unwrap().into_path())
        .filter(|file| file.extension().is_some_and(|end| end == "md"))
        .map(|file| (file.clone(), fs::read_to_string(file).unwrap()))
        .collect()
}

/// The blocks that name a file: the file, and their lines.
fn blocks(text: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(info) = line.strip_prefix("```") else {
            continue;
        };
        let inside = lines.by_ref().take_while(|line| *line != "```").collect();
        if let Some((_, file)) = info.split_once(' ') {
            found.push((file, inside));
        }
    }
    found
}

/// The lines without the indentation that they have in common.
fn flush_left(lines: &[&str]) -> Vec<String> {
    let filled = lines.iter().filter(|line| !line.trim().is_empty());
    let indent = filled
        .map(|line| line.len() - line.trim_start().len())
        .min();
    let cut = |line: &&str| line.get(indent.unwrap_or(0)..).unwrap_or("").to_owned();
    lines.iter().map(cut).collect()
}

/// Whether `file` has the lines of `block`, those behind an ellipsis further down.
fn contains(file: &str, block: &[&str]) -> bool {
    let lines: Vec<&str> = file.lines().collect();
    let parts = block.split(|line| line.trim() == ELLIPSIS);
    let (mut from, mut found) = (0, 0);
    for part in parts.filter(|part| !part.is_empty()) {
        let wanted = flush_left(part);
        let rest = lines.get(from..).unwrap_or_default();
        let mut windows = rest.windows(wanted.len());
        let Some(at) = windows.position(|window| flush_left(window) == wanted) else {
            return false;
        };
        from += at + wanted.len();
        found += 1;
    }
    found > 0
}

#[test]
fn blocks_are_parts_of_the_files_that_they_name() {
    let (root, mut count) = (root(), 0);
    for (document, text) in documents() {
        for (name, block) in blocks(&text) {
            let file = fs::read_to_string(root.join(name));
            let file =
                file.unwrap_or_else(|error| panic!("{}: {name}: {error}", document.display()));
            let block = block.as_slice();
            assert!(
                contains(&file, block),
                "{}: {name} has no such lines:\n{}",
                document.display(),
                block.join("\n")
            );
            count += 1;
        }
    }
    assert!(count > 0, "no document names a file");
}

#[test]
fn what_documents_link_to_is_there() {
    let published = format!("{}/blob/main/", env!("CARGO_PKG_REPOSITORY"));
    let mut count = 0;
    for (document, text) in documents() {
        for link in text.split("](").skip(1) {
            let Some((target, _)) = link.split_once(')') else {
                continue;
            };
            let path = target.split('#').next().unwrap_or("");
            // As READMEs of packages name them, which a registry shows.
            if let Some(path) = path.strip_prefix(&published) {
                assert!(
                    root().join(path).exists(),
                    "{}: {target}",
                    document.display()
                );
                count += 1;
                continue;
            }
            if path.is_empty() || path.contains("://") || path.contains(' ') {
                continue;
            }
            let here = document.parent().unwrap_or(Path::new("."));
            assert!(here.join(path).exists(), "{}: {target}", document.display());
        }
    }
    assert!(count > 0, "no README of a package links to the repository");
}

#[test]
fn every_document_is_in_the_index() {
    let docs = root().join("docs");
    let index = fs::read_to_string(docs.join("README.md")).unwrap();
    for (document, _) in documents() {
        let Ok(name) = document.strip_prefix(&docs) else {
            continue;
        };
        let name = name.to_string_lossy();
        assert!(
            name == "README.md" || index.contains(&format!("({name})")),
            "{name}"
        );
    }
}

#[test]
fn a_block_that_differs_is_found() {
    let file = "fn a() {\n    one();\n    two();\n    three();\n}\n";
    assert!(contains(file, &["one();", "two();"]));
    assert!(contains(
        file,
        &["fn a() {", "    one();", "    // ...", "    three();", "}"]
    ));
    assert!(
        !contains(file, &["one();", "three();"]),
        "a line is missing"
    );
    assert!(
        !contains(file, &["three();", "// ...", "one();"]),
        "the other way round"
    );
    assert!(
        !contains(file, &["one();", "  two();"]),
        "indented by itself"
    );
    assert!(!contains(file, &[]), "nothing");
}
