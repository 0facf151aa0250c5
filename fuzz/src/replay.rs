//! Replays the findings of the fuzz targets: the tests of the crates that have targets.
//!
//! `replay::tests!("CRATE", TARGETS)` is all that such a crate says; with `changed` behind, files of the
//! corpus are changed as well.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A target and its body, as in `fuzz/src/bytes.rs`.
type Target = (&'static str, fn(&[u8]));

/// The tests of a crate's targets.
macro_rules! tests {
    ($crate_name:literal, $targets:expr) => {
        #[test]
        fn every_file_of_the_corpus_still_holds() {
            crate::replay::all(&$targets);
        }

        #[test]
        fn every_target_is_built() {
            crate::replay::are_built($crate_name, &$targets);
        }
    };
    ($crate_name:literal, $targets:expr, changed) => {
        crate::replay::tests!($crate_name, $targets);

        proptest::proptest! {
            #[test]
            fn any_change_of_the_corpus_still_holds(
                nth in proptest::prelude::any::<u16>(),
                changes in proptest::collection::vec(proptest::prelude::any::<(u16, u8)>(), 0..24),
            ) {
                crate::replay::changed(&$targets, nth.into(), &changes);
            }
        }
    };
}
pub(crate) use tests;

/// The corpus, as seen from a crate.
fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

/// Every file of the corpus of these targets, through its body.
pub fn all(targets: &[Target]) {
    for (name, body) in targets {
        let directory = corpus().join(name);
        let files = fs::read_dir(&directory)
            .unwrap_or_else(|error| panic!("{} cannot be read: {error}", directory.display()));
        let mut replayed = 0;
        for file in files {
            let path = file.unwrap().path();
            // Said first, so that it stands above a failure.
            println!("{}", path.display());
            body(&fs::read(&path).unwrap());
            replayed += 1;
        }
        assert!(replayed > 0, "{} is empty", directory.display());
    }
}

/// The `nth` file of these targets with some changes, through its body.
#[allow(dead_code, reason = "not every crate's tests change files")]
pub fn changed(targets: &[Target], nth: usize, changes: &[(u16, u8)]) {
    let mut files: Vec<_> = targets
        .iter()
        .flat_map(|(name, body)| {
            let files = fs::read_dir(corpus().join(name)).unwrap();
            files.map(move |file| (file.unwrap().path(), body))
        })
        .collect();
    files.sort_by(|(one, _), (other, _)| one.cmp(other));
    let (path, body) = &files[nth % files.len()];
    let mut bytes = fs::read(path).unwrap();
    for (at, to) in changes {
        let len = bytes.len().max(1);
        match at % 4 {
            // A byte more, the rest again, the rest away.
            0 => bytes.insert(usize::from(at / 4) % len, *to),
            1 if bytes.len() < 4096 => {
                bytes.extend_from_within((usize::from(at / 4) % len).min(bytes.len())..)
            }
            2 if *to < 16 => bytes.truncate(usize::from(at / 4) % len),
            _ => {
                if let Some(byte) = bytes.get_mut(usize::from(at / 4) % len) {
                    *byte = *to;
                }
            }
        }
    }
    body(&bytes);
}

/// The programs of this crate's targets, which say `dmaspace_fuzz::target!(CRATE, ...)`, are these.
pub fn are_built(crate_name: &str, targets: &[Target]) {
    let call = format!("dmaspace_fuzz::target!({crate_name},");
    let mut built = Vec::new();
    for file in fs::read_dir(corpus().join("../fuzz_targets")).unwrap() {
        let path = file.unwrap().path();
        if fs::read_to_string(&path).unwrap().contains(&call) {
            built.push(path.file_stem().unwrap().to_str().unwrap().to_owned());
        }
    }
    built.sort();
    let mut targets: Vec<_> = targets.iter().map(|(name, _)| *name).collect();
    targets.sort_unstable();
    assert_eq!(built, targets);
}
