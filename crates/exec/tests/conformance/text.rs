//! The text of `testdata/ops/*.mil`, read. `testdata/mil_text.py` explains the form.

use std::collections::BTreeMap;

/// A type: MIL's name of the elements, and the dimensions; `None` is known only at run time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Type {
    /// A state of such tensors: `state fp16[2, 3]`.
    pub(crate) state: bool,
    pub(crate) dtype: String,
    pub(crate) dims: Vec<Option<usize>>,
}

#[derive(Clone, Debug)]
pub(crate) enum Argument {
    Value(String),
    Constant(Type, Vec<Literal>),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Literal {
    Number(f64),
    Bool(bool),
    Text(String),
}

impl Literal {
    pub(crate) fn number(&self) -> f64 {
        match self {
            Literal::Number(v) => *v,
            Literal::Bool(v) => f64::from(u8::from(*v)),
            Literal::Text(text) => panic!("{text:?} is no number"),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) kind: String,
    pub(crate) inputs: Vec<(String, Vec<Argument>)>,
    /// Constants in attributes, where opsets before iOS 18 keep the parts of a compressed weight.
    pub(crate) attributes: Vec<(String, Vec<Argument>)>,
    pub(crate) outputs: Vec<(String, Type)>,
    pub(crate) blocks: Vec<Block>,
}

#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) inputs: Vec<(String, Type)>,
    pub(crate) ops: Vec<Op>,
    pub(crate) results: Vec<Argument>,
}

/// A value a case gives or expects; differences of up to `within` of the largest value are allowed.
#[derive(Debug)]
pub(crate) struct Values {
    pub(crate) name: String,
    /// Of a value that is expected.
    pub(crate) ty: Option<Type>,
    pub(crate) within: f64,
    pub(crate) values: Vec<Literal>,
}

/// One run: its inputs, with states that are set before it, and its results, with states as they are after it.
#[derive(Debug, Default)]
pub(crate) struct Call {
    pub(crate) given: Vec<Values>,
    pub(crate) expected: Vec<Values>,
}

#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// Where the expected values are from.
    pub(crate) oracle: String,
    pub(crate) opset: String,
    pub(crate) body: Block,
    /// Runs on the same states, one after the other; at least one.
    pub(crate) calls: Vec<Call>,
    /// A part of the error that loading or running must give.
    pub(crate) fails: Option<String>,
}

/// An operation's operands, attributes included: by name, the types of what each is given.
pub(crate) type Operands = BTreeMap<String, Vec<Type>>;

impl Case {
    /// The version of iOS that the opset came with.
    pub(crate) fn version(&self) -> u32 {
        let number: u32 = self.opset.trim_start_matches("CoreML").parse().expect("an opset has a number");
        // CoreML6 came with iOS 16.
        number + 10
    }

    /// The operands of every operation `kind`, those in blocks included.
    pub(crate) fn operands(&self, kind: &str) -> Vec<Operands> {
        let mut found = Vec::new();
        self.body.operands(kind, &mut BTreeMap::new(), &mut found);
        found
    }
}

impl Block {
    /// `known`: the types of values so far.
    fn operands(&self, kind: &str, known: &mut BTreeMap<String, Type>, found: &mut Vec<Operands>) {
        known.extend(self.inputs.iter().cloned());
        for op in &self.ops {
            if op.kind == kind {
                let ty = |argument: &Argument| match argument {
                    Argument::Value(name) => known[name].clone(),
                    Argument::Constant(ty, _) => ty.clone(),
                };
                let all = op.inputs.iter().chain(&op.attributes);
                found.push(all.map(|(name, given)| (name.clone(), given.iter().map(ty).collect())).collect());
            }
            known.extend(op.outputs.iter().cloned());
            op.blocks.iter().for_each(|inner| inner.operands(kind, known, found));
        }
    }
}

/// All cases of a file.
pub(crate) fn cases(text: &str) -> Vec<Case> {
    let mut reader = Reader { tokens: tokens(text), at: 0 };
    let mut cases = Vec::new();
    while reader.peek().is_some() {
        cases.push(reader.case());
    }
    cases
}

/// Words and numbers, strings with their quotes, and single signs.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let len = if first == '"' {
                let mut escaped = false;
                let end = rest[1..].find(|c| {
                    let ends = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    ends
                });
                end.expect("a string ends on its line") + 2
            } else if first.is_alphanumeric() || "_-+.".contains(first) {
                rest.find(|c: char| !(c.is_alphanumeric() || "_-+.".contains(c))).unwrap_or(rest.len())
            } else {
                first.len_utf8()
            };
            tokens.push(rest[..len].to_owned());
            rest = rest[len..].trim_start();
        }
    }
    tokens
}

struct Reader {
    tokens: Vec<String>,
    at: usize,
}

impl Reader {
    fn peek(&self) -> Option<&str> {
        self.tokens.get(self.at).map(String::as_str)
    }

    fn next(&mut self) -> String {
        self.at += 1;
        self.tokens.get(self.at - 1).expect("the text ends in the middle of a case").clone()
    }

    fn takes(&mut self, token: &str) -> bool {
        let found = self.peek() == Some(token);
        self.at += usize::from(found);
        found
    }

    #[track_caller]
    fn expect(&mut self, token: &str) {
        let found = self.next();
        let before = self.tokens[self.at.saturating_sub(12)..self.at].join(" ");
        assert_eq!(found, token, "after `{before}`");
    }

    fn case(&mut self) -> Case {
        self.expect("case");
        let (name, oracle) = (self.next(), self.next());
        self.expect("func");
        let opset = self.next();
        let body = self.block();
        let (mut calls, mut call, mut fails) = (Vec::new(), Call::default(), None);
        loop {
            if self.takes("given") {
                call.given.push(self.values());
            } else if self.takes("expect") {
                call.expected.push(self.values());
            } else if self.takes("again") {
                calls.push(std::mem::take(&mut call));
            } else if self.takes("fails") {
                fails = Some(unquoted(&self.next()));
                self.expect(";");
            } else {
                calls.push(call);
                return Case { name, oracle, opset, body, calls, fails };
            }
        }
    }

    fn values(&mut self) -> Values {
        let name = self.next();
        let ty = self.takes(":").then(|| self.ty());
        let within =
            if self.takes("within") { self.next().parse().expect("a tolerance is a number") } else { 0.0 };
        self.expect("=");
        let mut values = Vec::new();
        while !self.takes(";") {
            values.push(self.literal());
            self.takes(",");
        }
        Values { name, ty, within, values }
    }

    fn literal(&mut self) -> Literal {
        let token = self.next();
        match token.as_str() {
            "true" => Literal::Bool(true),
            "false" => Literal::Bool(false),
            text if text.starts_with('"') => Literal::Text(unquoted(text)),
            number => Literal::Number(number.parse().unwrap_or_else(|_| panic!("`{number}` is no number"))),
        }
    }

    fn ty(&mut self) -> Type {
        let state = self.takes("state");
        let dtype = self.next();
        let mut dims = Vec::new();
        if self.takes("[") {
            while !self.takes("]") {
                let dim = self.next();
                dims.push((dim != "?").then(|| dim.parse().expect("a dimension is a number")));
                self.takes(",");
            }
        }
        Type { state, dtype, dims }
    }

    /// `name: type`, separated by commas, up to `end`.
    fn definitions(&mut self, end: &str) -> Vec<(String, Type)> {
        let mut definitions = Vec::new();
        while !self.takes(end) {
            let name = self.next();
            self.expect(":");
            definitions.push((name, self.ty()));
            self.takes(",");
        }
        definitions
    }

    /// `(inputs) { operations; return results; }`
    fn block(&mut self) -> Block {
        self.expect("(");
        let inputs = self.definitions(")");
        self.expect("{");
        let mut ops = Vec::new();
        loop {
            if self.takes("return") {
                let mut results = Vec::new();
                while !self.takes(";") {
                    results.push(self.argument());
                    self.takes(",");
                }
                self.expect("}");
                return Block { inputs, ops, results };
            }
            ops.push(self.op());
        }
    }

    fn op(&mut self) -> Op {
        // An operation without results, such as `write_state`, has no `=`.
        let named = self.tokens.get(self.at + 1).is_some_and(|t| t == ":");
        let outputs = if named { self.definitions("=") } else { Vec::new() };
        let kind = self.next();
        self.expect("(");
        let inputs = self.arguments(")");
        let attributes = if self.takes("[") { self.arguments("]") } else { Vec::new() };
        let mut blocks = Vec::new();
        while !self.takes(";") {
            blocks.push(self.block());
        }
        Op { kind, inputs, attributes, outputs, blocks }
    }

    /// `name = argument` or `name = (argument, …)`, separated by commas, up to `end`.
    fn arguments(&mut self, end: &str) -> Vec<(String, Vec<Argument>)> {
        let mut named = Vec::new();
        while !self.takes(end) {
            let name = self.next();
            self.expect("=");
            let mut arguments = Vec::new();
            if self.takes("(") {
                while !self.takes(")") {
                    arguments.push(self.argument());
                    self.takes(",");
                }
            } else {
                arguments.push(self.argument());
            }
            named.push((name, arguments));
            self.takes(",");
        }
        named
    }

    fn argument(&mut self) -> Argument {
        if !matches!(self.tokens.get(self.at + 1).map(String::as_str), Some("(" | "[")) {
            return Argument::Value(self.next());
        }
        let ty = self.ty();
        self.expect("(");
        let mut values = Vec::new();
        while !self.takes(")") {
            values.push(self.literal());
            self.takes(",");
        }
        Argument::Constant(ty, values)
    }
}

fn unquoted(text: &str) -> String {
    serde_json::from_str(text).expect("strings are written as in JSON")
}
