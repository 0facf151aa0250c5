//! Reports for programs: one document for each, with the version of its schema.

use std::fmt::Write as _;

use serde::Serialize;

/// Changes when a name, a unit or a type does; names that are added leave it as it is.
const SCHEMA: u32 = 1;

/// A report below the version of its schema.
#[derive(Serialize)]
struct Document<'a, T> {
    schema: u32,
    #[serde(flatten)]
    report: &'a T,
}

impl<'a, T> Document<'a, T> {
    const fn of(report: &'a T) -> Self {
        Self {
            schema: SCHEMA,
            report,
        }
    }
}

/// The document, to be read by people too.
pub(crate) fn json(report: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string_pretty(&Document::of(report)).map(|json| ascii(&json) + "\n")
}

/// The document in a line.
pub(crate) fn json_line(report: &impl Serialize) -> serde_json::Result<String> {
    serde_json::to_string(&Document::of(report)).map(|json| ascii(&json) + "\n")
}

/// The same text whatever the locale: what is not ASCII stands in strings, and is escaped there.
fn ascii(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii() {
            out.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                // Writing to a string does not fail.
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
    out
}

/// Words of 64 bits, as addresses and entries are: numbers lose digits above 2^53 where a reader has doubles
/// (`jq` 1.6). Bytes and counts stay numbers, which are exact there: bytes of pages are multiples of 4096.
pub(crate) mod hex {
    use serde::Serializer;

    // The signature is serde's.
    #[expect(clippy::trivially_copy_pass_by_ref)]
    pub(crate) fn serialize<S: Serializer>(word: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{word:#x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    #[serde(tag = "event", rename_all = "snake_case")]
    enum Sample {
        Walk {
            #[serde(with = "hex")]
            iova: u64,
            bytes: u64,
            name: &'static str,
        },
    }

    #[test]
    fn a_document_has_its_version_first_words_in_hex_and_only_ascii() {
        let sample = Sample::Walk {
            iova: u64::MAX,
            bytes: 4096,
            name: "µ 💾",
        };
        let expected = "{\"schema\":1,\"event\":\"walk\",\"iova\":\"0xffffffffffffffff\",\"bytes\":4096,\
            \"name\":\"\\u00b5 \\ud83d\\udcbe\"}\n";
        let line = json_line(&sample).unwrap();
        assert_eq!(line, expected);
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["name"], "µ 💾");
        assert!(json(&sample).unwrap().starts_with("{\n  \"schema\": 1,\n"));
    }
}
