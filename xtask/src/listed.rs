//! Which tests, benches and items there are: asked of Cargo, of the test programs and of rustdoc.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use cargo_metadata::camino::Utf8Path;
use cargo_metadata::{Artifact, Message, Package};
use walkdir::WalkDir;

use crate::{cargo::Repository, parts};

/// The tests that the part `tests` runs: `runs::join::tests::name` in a library, `iopt::operations::counted::name`
/// in the test program `operations`. Crates by their directories, with underscores.
pub(crate) fn tests(repository: &Repository) -> anyhow::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for selection in parts::tested() {
        let mut build = repository.cargo(&["test", "--no-run", "--quiet"]);
        build.args(["--message-format", "json-render-diagnostics"]);
        let mut build = build.args(selection).stdout(Stdio::piped()).spawn()?;
        let said = build.stdout.take().context("cargo says nothing")?;
        for message in Message::parse_stream(BufReader::new(said)) {
            let Message::CompilerArtifact(artifact) = message? else {
                continue;
            };
            let program = artifact.executable.as_ref();
            if let Some(program) = program.filter(|_| artifact.profile.test) {
                let prefix = prefix(repository, &artifact);
                let ignored = list(program, &["--ignored"])?;
                let runs = list(program, &[])?.into_iter();
                let runs = runs.filter(|test| !ignored.contains(test));
                found.extend(runs.map(|test| format!("{prefix}::{test}")));
            }
        }
        ensure!(build.wait()?.success(), "the tests cannot be built");
    }
    Ok(found)
}

fn prefix(repository: &Repository, artifact: &Artifact) -> String {
    let krate = directory(&repository.metadata[&artifact.package_id]);
    match artifact.target.is_test() {
        true => format!("{krate}::{}", artifact.target.name),
        false => krate,
    }
}

/// The crate as `docs/origins.md` calls it.
fn directory(package: &Package) -> String {
    let directory = package.manifest_path.parent().and_then(Utf8Path::file_name);
    directory.unwrap_or_default().replace('-', "_")
}

/// The tests that a program has.
fn list(program: &Utf8Path, more: &[&str]) -> anyhow::Result<BTreeSet<String>> {
    let mut command = Command::new(program);
    let output = command
        .args(["--list", "--format", "terse"])
        .args(more)
        .output()
        .with_context(|| format!("{program} cannot be started"))?;
    ensure!(output.status.success(), "{program}: {}", output.status);
    let text = String::from_utf8(output.stdout)?;
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names.map(str::to_owned).collect())
}

/// All benches: `ioas/pin`.
pub(crate) fn benches(repository: &Repository) -> BTreeSet<String> {
    let packages = repository.metadata.workspace_packages().into_iter();
    packages
        .flat_map(|package| {
            let benches = package.targets.iter().filter(|target| target.is_bench());
            benches.map(move |bench| format!("{}/{}", directory(package), bench.name))
        })
        .collect()
}

/// The documentation that the part `docs` makes.
pub(crate) struct Pages(BTreeMap<String, Vec<PathBuf>>);

impl Pages {
    pub(crate) fn read(repository: &Repository) -> anyhow::Result<Self> {
        parts::docs(repository)?;
        let root = repository.metadata.target_directory.join("doc");
        let mut pages = BTreeMap::<String, Vec<PathBuf>>::new();
        for page in WalkDir::new(&root) {
            let page = page?.into_path();
            let below = page.strip_prefix(&root)?.iter().next();
            let krate = below.map(|name| name.to_string_lossy().into_owned());
            pages
                .entry(krate.unwrap_or_default())
                .or_default()
                .push(page);
        }
        Ok(Self(pages))
    }

    /// `iopt::Table::map`: a public item. The last word has a page, or is a member on the page of the word before.
    /// Modules between may be left out.
    pub(crate) fn has(&self, item: &str) -> bool {
        let words: Vec<&str> = item.split("::").collect();
        let [krate, middle @ .., last] = words.as_slice() else {
            return false;
        };
        let of = |name: &str| {
            let (module, page) = (format!("/{name}/index.html"), format!(".{name}.html"));
            let pages = self.0.get(*krate).into_iter().flatten();
            pages.filter(move |path| {
                let path = path.to_string_lossy();
                path.ends_with(&module) || path.ends_with(&page)
            })
        };
        let member = format!(".{last}\"");
        let has_member =
            |path: &PathBuf| fs::read_to_string(path).is_ok_and(|page| page.contains(&member));
        of(last).next().is_some() || middle.last().is_some_and(|owner| of(owner).any(has_member))
    }
}
