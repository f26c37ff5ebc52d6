// Package invariants checks that a hub and a spoke agree: nothing has leaked, nothing is
// duplicated, and no machine was taken from its owner.
//
// It only uses the content of the API servers and the documented meaning of the marks there. It
// shares no code with the agent, so that a mistake in the agent's arithmetic is not repeated here.
//
// Most checks only hold at rest. While machines come and go, use [Checker.Settle], which retries
// until all of them pass. Invariants that must hold at every moment (such as no two NodeClaims with
// one provider ID) have their own function, [State.Always].
package invariants
