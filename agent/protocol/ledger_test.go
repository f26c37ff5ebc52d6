package protocol

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
)

func TestLedgerSurvivesItsEncoding(t *testing.T) {
	l := &Ledger{
		Version: 1, Seq: 7, Floor: 2, LastReplicas: 5, Spare: 1,
		Pending:   map[string]Assignment{"a": {}, "b": {Machine: "m", UID: "u"}},
		Releasing: map[types.UID]Release{"x": {Machine: "n", Claim: "c", Drained: true, Decremented: true, Generation: 9}},
		Returning: map[types.UID]Returned{"y": {Machine: "o", Claim: "d"}},
		Paused:    &Paused{At: 8, Before: 3},
	}
	got, err := ParseLedger(l.Encode())
	require.NoError(t, err)
	assert.Equal(t, l, got)
}

func TestLedgerOfANewerAgentIsRefused(t *testing.T) {
	_, err := ParseLedger(`{"v":3,"seq":1}`)
	assert.ErrorIs(t, err, ErrNewerLedger)
}

func TestLedgerClonesShareNothing(t *testing.T) {
	l := &Ledger{Version: 1, Pending: map[string]Assignment{"a": {}}}
	c := l.Clone()
	c.Pending["b"] = Assignment{}
	c.Releasing["x"] = Release{}
	c.Returning["y"] = Returned{}
	assert.Len(t, l.Pending, 1)
	assert.Empty(t, l.Releasing)
	assert.Empty(t, l.Returning)
	assert.False(t, l.same(c))
}

// FuzzParseLedger shows that any annotation parses into a ledger with possible numbers, or into an
// error.
func FuzzParseLedger(f *testing.F) {
	f.Add(`{"v":1,"seq":3,"floor":1,"lastReplicas":2,"spare":0,"pending":{"a":{}}}`)
	f.Add(`{"v":1,"floor":-1}`)
	f.Add(`[]`)
	f.Add(``)
	f.Fuzz(func(t *testing.T, text string) {
		l, err := ParseLedger(text)
		if err == nil && (l.Floor < 0 || l.LastReplicas < 0 || l.Seq < 0 || l.Version < 1 || l.Version > LedgerVersion) {
			t.Fatalf("accepted %q", text)
		}
	})
}
