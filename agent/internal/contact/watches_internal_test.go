package contact

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

func TestAKindWhoseWatchFailsIsAskedForUntilItIsAnswered(t *testing.T) {
	var (
		asked  []string
		answer = map[string]error{}
		lines  []string
	)
	w := NewWatches([]string{"*a.A", "*b.B"}, funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{}))
	ask := func() error {
		return w.Ask(t.Context(), func(_ context.Context, kind string) error {
			asked = append(asked, kind)
			return answer[kind]
		})
	}
	require.NoError(t, ask())
	for _, ended := range []error{io.EOF, io.ErrUnexpectedEOF, apierrors.NewResourceExpired("too old")} {
		w.failedAt("*a.A", ended)
	}
	require.NoError(t, ask())
	require.Empty(t, asked, "no watch has failed")

	answer["*b.B"] = errAway
	w.failedAt("*b.B", errors.New("forbidden"))
	w.failedAt("*b.B", errors.New("forbidden"))
	w.failedAt("optional/v1, Kind=C", errors.New("not installed"))
	for range 2 {
		err := ask()
		require.ErrorIs(t, err, errAway)
		require.ErrorContains(t, err, "*b.B")
	}
	require.Equal(t, []string{"*b.B", "*b.B"}, asked)
	delete(answer, "*b.B")
	require.NoError(t, ask())
	require.NoError(t, ask())
	require.Len(t, asked, 3, "once it is answered, its watch resumes")

	require.Len(t, lines, 2, "one for each kind and minute")
	require.Contains(t, lines[0], `"kind"="*b.B"`)
	require.Contains(t, lines[0], "forbidden")
	require.NoError(t, testutil.CollectAndCompare(w.Collector(), strings.NewReader(
		"# HELP capi_agent_watch_errors_total Number of times that the hub's API server refused or failed to list or watch a kind for the agent's caches, "+
			"by the type of its objects, or policy or price list.\n# TYPE capi_agent_watch_errors_total counter\n"+
			"capi_agent_watch_errors_total{kind=\"*b.B\"} 2\ncapi_agent_watch_errors_total{kind=\"optional/v1, Kind=C\"} 1\n")))
}
