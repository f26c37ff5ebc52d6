// Package invariants checks that a hub and a spoke agree: nothing leaked, nothing doubled, nobody's machine taken.
//
// It knows only what the API servers hold and the documented meaning of the marks there, and shares no code with the
// agent: a mistake in the agent's arithmetic is not repeated here.
//
// Most of what it checks is true only at rest. While machines come and go, use [Checker.Settle], which looks again until
// everything holds; what must hold at every moment (no two NodeClaims with one provider ID, for example) has its own
// function, [State.Always].
package invariants
