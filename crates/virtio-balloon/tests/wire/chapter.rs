//! `docs/balloon-monitor.md` beside `examples/monitor.rs`: the chapter shows the code that is run.

use std::fs;
use std::path::Path;

#[test]
fn the_chapter_shows_the_example() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let chapter = fs::read_to_string(root.join("../../docs/balloon-monitor.md")).unwrap();
    let example = fs::read_to_string(root.join("examples/monitor.rs")).unwrap();
    let blocks = chapter.split("```rust\n").skip(1);
    let blocks: Vec<_> = blocks
        .map(|block| block.split("```").next().unwrap())
        .collect();
    assert_eq!(blocks.len(), 3);
    for block in blocks {
        assert!(
            example.contains(block),
            "the example has no such code:\n{block}"
        );
    }
}
