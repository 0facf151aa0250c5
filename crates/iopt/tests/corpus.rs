//! What the fuzz targets came upon, once more: every file of `fuzz/corpus` through the body of its
//! target.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

use std::fs;
use std::path::Path;

#[allow(unreachable_pub, reason = "public to the fuzz targets")]
mod fuzz_bodies;

fn corpus() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

#[test]
fn every_file_of_the_corpus_still_holds() {
    for (name, _) in fuzz_bodies::TARGETS {
        let directory = corpus().join(name);
        let files = fs::read_dir(&directory)
            .unwrap_or_else(|error| panic!("{} cannot be read: {error}", directory.display()));
        let mut replayed = 0;
        for file in files {
            let path = file.unwrap().path();
            // Said first, so that it stands above a failure.
            println!("{}", path.display());
            fuzz_bodies::run(name, &fs::read(&path).unwrap());
            replayed += 1;
        }
        assert!(replayed > 0, "{} is empty", directory.display());
    }
}

#[test]
fn every_corpus_belongs_to_a_target_that_is_built() {
    let names = |directory: &Path| {
        let mut names: Vec<String> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| {
                entry
                    .unwrap()
                    .path()
                    .file_stem()
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_owned()
            })
            .collect();
        names.sort();
        names
    };
    let mut targets: Vec<_> = fuzz_bodies::TARGETS.iter().map(|(name, _)| *name).collect();
    targets.sort_unstable();
    assert_eq!(names(&corpus()), targets);
    assert_eq!(names(&corpus().join("../fuzz_targets")), targets);
}
