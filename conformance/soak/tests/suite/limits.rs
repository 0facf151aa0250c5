//! The limits: those that are quick as they are, and the long ones smaller.

use std::process::Command;

#[test]
fn every_limit_holds_also_when_it_is_smaller() {
    let limits = env!("CARGO_BIN_EXE_limits");
    let output = Command::new(limits)
        .args(["--areas", "3000", "--gib", "1", "--rounds", "10"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{output:?}");
    for name in ["areas", "4 KiB leaves", "57 bits", "devices", "threads"] {
        assert!(text.contains(name), "{name}: {text}");
    }
}
