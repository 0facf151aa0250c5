//! Tells the program of which commit it was built, where that is known.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
    };
    // A package from the registry may lie inside another repository.
    let ours = git(&["ls-files", "--error-unmatch", "build.rs"]).is_some();
    let described = ours.then(|| git(&["describe", "--always", "--dirty", "--abbrev=12"]));
    if let Some(commit) = described.flatten() {
        println!("cargo:rustc-env=DMASPACE_COMMIT={commit}");
        // The log of HEAD changes with every commit and checkout.
        if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
            println!("cargo:rerun-if-changed={log}");
        }
    }
}
