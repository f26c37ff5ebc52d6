package claims

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

func TestTokensAreBoundToTheirHolderAndTime(t *testing.T) {
	const life, grace = 10 * time.Minute, 30 * time.Second
	w := newTestTime()
	text := token{Namespace: "fleet", Cluster: "spoke", Holder: "karpenter", Time: w}.encode()
	parse := func(text, cluster, holder string, now time.Time) error {
		e := New(Config{Clock: clocktesting.NewFakeClock(now), TokenLife: life, CollectGrace: grace})
		parsed, err := e.parseToken(SyncRequest{Namespace: "fleet", Cluster: cluster, Holder: holder, Token: text})
		if err == nil {
			assert.False(t, parsed.Time.After(w))
			assert.False(t, parsed.Time.After(now), "no listing is of the future")
		}
		return err
	}

	require.NoError(t, parse(text, "spoke", "karpenter", w.Add(life)))
	require.NoError(t, parse(text, "spoke", "karpenter", w.Add(-2*grace)), "from a clock that is ahead")
	require.ErrorIs(t, parse(text, "spoke", "somebody", w), ErrInvalidToken)
	require.ErrorIs(t, parse(text, "other", "karpenter", w), ErrInvalidToken)
	require.ErrorIs(t, parse("nonsense", "spoke", "karpenter", w), ErrInvalidToken)
	require.ErrorIs(t, parse(text, "spoke", "karpenter", w.Add(life+1)), ErrStaleToken)
	require.ErrorIs(t, parse(text, "spoke", "karpenter", w.Add(-life-1)), ErrStaleToken)
}

// Only the API server's clock decides whether a claim was made before the listing, however wrong
// the agent's clock is.
func TestATokenKnowsWhichClaimsItsListingHeld(t *testing.T) {
	w := newTestTime()
	claim := func(id string, made time.Time) v1alpha1.MachineClaim {
		return v1alpha1.MachineClaim{
			ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(made)}, Spec: v1alpha1.MachineClaimSpec{ClaimID: id},
		}
	}
	older, newest := claim("older", w.Add(-time.Second)), claim("newest", w)
	sameSecond, later := claim("same-second", w), claim("later", w.Add(time.Second))
	type set = []v1alpha1.MachineClaim
	for name, c := range map[string]struct {
		then, now set
		want      []string
	}{
		"all of the listing":                   {set{older, newest}, set{older, newest}, []string{"older", "newest"}},
		"none that is newer":                   {set{older, newest}, set{older, newest, later}, []string{"older", "newest"}},
		"none of a second that has grown":      {set{older, newest}, set{older, newest, sameSecond}, []string{"older"}},
		"none that took the place of another":  {set{newest}, set{sameSecond}, nil},
		"older ones though the newest is gone": {set{older, newest}, set{older}, []string{"older"}},
		"none of an empty listing":             {nil, set{older}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			text := newToken(ListOptions{Namespace: "fleet", Cluster: "spoke", Holder: "karpenter"}, w.Add(time.Hour), c.then).encode()
			e := New(Config{Clock: clocktesting.NewFakeClock(w.Add(time.Hour))})
			parsed, err := e.parseToken(SyncRequest{Namespace: "fleet", Cluster: "spoke", Holder: "karpenter", Token: text})
			require.NoError(t, err)
			listed := parsed.listed(c.now)
			var got []string
			for i := range c.now {
				if listed(&c.now[i]) {
					got = append(got, c.now[i].Spec.ClaimID)
				}
			}
			assert.Equal(t, c.want, got)
		})
	}
}

func newTestTime() time.Time { return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) }
