//! The soak, for seconds: the program of `cargo xtask soak`.

use std::process::Command;

#[test]
fn a_short_soak_finds_nothing_and_leaves_nothing() {
    let soak = env!("CARGO_BIN_EXE_soak");
    let output = Command::new(soak)
        .args([
            "--seconds",
            "2",
            "--seed",
            "1",
            "--threads",
            "2",
            "--mutators",
            "4",
        ])
        .args(["--quiet", "150"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{output:?}");
    assert!(text.contains("unmap cutting"), "{text}");
}
