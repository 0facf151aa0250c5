//! What the fuzz targets came upon, once more: for the tests of the crates that have targets.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The corpus, as seen from a crate.
fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

/// Every file of the corpus of these targets, through `run`.
pub fn all<'t>(targets: impl IntoIterator<Item = &'t str>, run: impl Fn(&str, &[u8])) {
    for name in targets {
        let directory = corpus().join(name);
        let files = fs::read_dir(&directory)
            .unwrap_or_else(|error| panic!("{} cannot be read: {error}", directory.display()));
        let mut replayed = 0;
        for file in files {
            let path = file.unwrap().path();
            // Said first, so that it stands above a failure.
            println!("{}", path.display());
            run(name, &fs::read(&path).unwrap());
            replayed += 1;
        }
        assert!(replayed > 0, "{} is empty", directory.display());
    }
}

/// The `nth` file of these targets with some changes, through `run`.
#[allow(dead_code, reason = "not every crate's tests change files")]
pub fn changed<'t>(
    targets: impl IntoIterator<Item = &'t str>,
    nth: usize,
    changes: &[(u16, u8)],
    run: impl Fn(&str, &[u8]),
) {
    let mut files: Vec<_> = targets
        .into_iter()
        .flat_map(|name| {
            let files = fs::read_dir(corpus().join(name)).unwrap();
            files.map(move |file| (name, file.unwrap().path()))
        })
        .collect();
    files.sort();
    let (name, path) = &files[nth % files.len()];
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
    run(name, &bytes);
}

/// The programs of this crate's targets, which call `dmaspace_fuzz::NAME::run`, are these.
pub fn are_built<'t>(crate_name: &str, targets: impl IntoIterator<Item = &'t str>) {
    let call = format!("dmaspace_fuzz::{crate_name}::run");
    let mut built = Vec::new();
    for file in fs::read_dir(corpus().join("../fuzz_targets")).unwrap() {
        let path = file.unwrap().path();
        if fs::read_to_string(&path).unwrap().contains(&call) {
            built.push(path.file_stem().unwrap().to_str().unwrap().to_owned());
        }
    }
    built.sort();
    let mut targets: Vec<_> = targets.into_iter().collect();
    targets.sort_unstable();
    assert_eq!(built, targets);
}
