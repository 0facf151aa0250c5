//! Names among the tokens of macros, which have no syntax of their own.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Finds `#[test] fn name` among the tokens of a macro.
#[derive(Default)]
pub(crate) struct TestScan {
    /// Name, and whether the test is ignored.
    pub(crate) names: Vec<(String, bool)>,
    /// `#[test] fn $name` was there.
    pub(crate) template: bool,
}

impl TestScan {
    /// Looks through the tokens, at any depth.
    pub(crate) fn scan(&mut self, tokens: TokenStream) {
        let mut tokens = tokens.into_iter().peekable();
        // What the attributes so far say of the function that follows.
        let (mut test, mut ignored) = (false, false);
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Punct(p) if p.as_char() == '#' => {
                    if let Some(TokenTree::Group(group)) = tokens.peek()
                        && group.delimiter() == Delimiter::Bracket
                    {
                        let name = attribute_name(group.stream());
                        test |= name == "test";
                        ignored |= name == "ignore";
                        tokens.next();
                    }
                }
                TokenTree::Ident(word) if word == "fn" => {
                    match tokens.peek() {
                        Some(TokenTree::Ident(name)) if test => {
                            self.names.push((name.to_string(), ignored));
                        }
                        Some(TokenTree::Punct(p)) if test && p.as_char() == '$' => {
                            self.template = true;
                        }
                        _ => {}
                    }
                    (test, ignored) = (false, false);
                }
                TokenTree::Ident(word) if word == "pub" || word == "async" => {}
                TokenTree::Group(group) => {
                    (test, ignored) = (false, false);
                    self.scan(group.stream());
                }
                // `$(#[$meta:meta])*` between the attributes is a group and is passed over by
                // the arm above; everything else ends them.
                _ => (test, ignored) = (false, false),
            }
        }
    }
}

/// The last word of the path with which an attribute begins.
fn attribute_name(tokens: TokenStream) -> String {
    let mut name = String::new();
    for token in tokens {
        match token {
            TokenTree::Ident(word) => name = word.to_string(),
            TokenTree::Punct(p) if p.as_char() == ':' => {}
            _ => break,
        }
    }
    name
}

/// The names in `pub struct Name`, `pub fn name` and so on, at any depth.
pub(crate) fn public_names(tokens: TokenStream, names: &mut Vec<String>) {
    const KINDS: [&str; 6] = ["struct", "enum", "trait", "fn", "const", "type"];
    let tokens: Vec<_> = tokens.into_iter().collect();
    for window in tokens.windows(3) {
        if let [
            TokenTree::Ident(vis),
            TokenTree::Ident(kind),
            TokenTree::Ident(name),
        ] = window
            && vis == "pub"
            && KINDS.iter().any(|word| kind == word)
        {
            names.push(name.to_string());
        }
    }
    for token in tokens {
        if let TokenTree::Group(group) = token {
            public_names(group.stream(), names);
        }
    }
}

/// Every word, at any depth.
pub(crate) fn all_idents(tokens: TokenStream, idents: &mut BTreeSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Ident(word) => {
                idents.insert(word.to_string());
            }
            TokenTree::Group(group) => all_idents(group.stream(), idents),
            _ => {}
        }
    }
}
