package claims

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
)

func TestLedgerSurvivesItsEncoding(t *testing.T) {
	l := &Ledger{
		Version: 1, Seq: 7, Floor: 2, LastReplicas: 5, Spare: 1,
		Pending:   map[string]Named{"a": {}, "b": {Machine: "m", UID: "u"}},
		Releasing: map[types.UID]Release{"x": {Machine: "n", Claim: "c", Drained: true, GivenBack: true, Generation: 9}},
	}
	got, err := parseLedger(l.encode())
	require.NoError(t, err)
	assert.Equal(t, l, got)
}

func TestLedgerOfANewerAgentIsRefused(t *testing.T) {
	_, err := parseLedger(`{"v":2,"seq":1}`)
	assert.ErrorIs(t, err, ErrNewerLedger)
}

func TestLedgerClonesShareNothing(t *testing.T) {
	l := &Ledger{Version: 1, Pending: map[string]Named{"a": {}}}
	c := l.clone()
	c.Pending["b"] = Named{}
	c.Releasing["x"] = Release{}
	assert.Len(t, l.Pending, 1)
	assert.Empty(t, l.Releasing)
	assert.False(t, l.same(c))
}

// FuzzParseLedger shows that whatever is in the annotation is either a ledger with possible numbers or an error.
func FuzzParseLedger(f *testing.F) {
	f.Add(`{"v":1,"seq":3,"floor":1,"lastReplicas":2,"spare":0,"pending":{"a":{}}}`)
	f.Add(`{"v":1,"floor":-1}`)
	f.Add(`[]`)
	f.Add(``)
	f.Fuzz(func(t *testing.T, text string) {
		l, err := parseLedger(text)
		if err == nil && (l.Floor < 0 || l.LastReplicas < 0 || l.Seq < 0 || l.Version != 1) {
			t.Fatalf("accepted %q", text)
		}
	})
}

func TestTokensAreBoundToTheirHolderAndTime(t *testing.T) {
	const life = 10 * time.Minute
	w := newTestTime()
	text := token{Namespace: "fleet", Cluster: "spoke", Holder: "karpenter", Time: w}.encode()

	at, err := parseToken(text, "fleet", "spoke", "karpenter", w.Add(life), life)
	require.NoError(t, err)
	assert.True(t, at.Equal(w))

	_, err = parseToken(text, "fleet", "spoke", "somebody", w, life)
	require.ErrorIs(t, err, ErrInvalidToken)
	_, err = parseToken(text, "fleet", "other", "karpenter", w, life)
	require.ErrorIs(t, err, ErrInvalidToken)
	_, err = parseToken("nonsense", "fleet", "spoke", "karpenter", w, life)
	require.ErrorIs(t, err, ErrInvalidToken)
	_, err = parseToken(text, "fleet", "spoke", "karpenter", w.Add(life+1), life)
	require.ErrorIs(t, err, ErrStaleToken)
}

func newTestTime() time.Time { return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) }
