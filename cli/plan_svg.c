/* SPDX-License-Identifier: MIT
 *
 * Speed-up against transfer share, for 1 to 4 buffers: the work's items and bytes with compute from none to nearly all, planned at each point. Like the
 * timelines it brings its own background, fonts and colours, so it shows the same on light and dark pages.
 *
 *     title
 *     2.0 |        .--.
 *         |     .-'    '-.        legend
 *     1.0 |___.'__________'.__
 *          0 %               100 %
 *     machine, source of the figures
 */
#include "plan.h"
#include "signals.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 760, HEIGHT = 440, LEFT = 64, RIGHT = 28, TOP = 62, BOTTOM = 86, POINTS = 98, CURVES = 4 };

struct point {
    double share, speedup[CURVES];
};

struct drawing {
    const struct planning *p;
    FILE *to;
    struct point points[POINTS];
    double low, high; /* of the speed-up axis */
};

/* Widest first, so that curves that lie on each other all show. */
static const struct {
    const char *color;
    double width;
} looks[CURVES] = {{"#6b7078", 2}, {"#2b64c8", 2.5}, {"#86cfa4", 6}, {"#f0b277", 10}};

/* What XML cannot hold stands for itself nowhere in names of devices and profiles but here. */
static void put_text(FILE *to, const char *text)
{
    for (; *text != '\0'; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '<')
            fputs("&lt;", to);
        else if (c == '>')
            fputs("&gt;", to);
        else if (c == '&')
            fputs("&amp;", to);
        else
            fputc(c >= 0x20 && c <= 0x7e ? c : '?', to);
    }
}

static double x_of(double share)
{
    return LEFT + share * (WIDTH - LEFT - RIGHT);
}

static double y_of(const struct drawing *d, double speedup)
{
    return HEIGHT - BOTTOM - (speedup - d->low) / (d->high - d->low) * (HEIGHT - TOP - BOTTOM);
}

/* Compute is chosen so that the copies' own share goes from 98 % down; the last point has none. */
static side_status plan_points(struct drawing *d)
{
    side_plan_work w = d->p->work;
    const double copies = d->p->plan.h2d_s + d->p->plan.d2h_s + w.source_s;

    w.depth = 0;
    w.budget_bytes = 0;
    for (int i = 0; i < POINTS; i++) {
        const double share = (i + 1) / (double)POINTS;
        side_plan plan = SIDE_PLAN_INIT;
        w.compute_s = copies * (1 - share) / share;
        side_status s = signals_interrupted() ? SIDE_CANCELLED : side_plan_make(&d->p->machine, &w, &plan);
        if (s != SIDE_OK)
            return s;
        d->points[i].share = planning_share(&plan, &w);
        for (int c = 0; c < CURVES; c++)
            d->points[i].speedup[c] = planning_serial(&plan, &w) / plan.depth_s[c];
    }
    return SIDE_OK;
}

/* Steps of a fifth or a half, whole ones where there are many. */
static double scale(struct drawing *d)
{
    double least = 1, most = d->p->plan.speedup;

    for (int i = 0; i < POINTS; i++)
        for (int c = 0; c < CURVES; c++) {
            least = fmin(least, d->points[i].speedup[c]);
            most = fmax(most, d->points[i].speedup[c]);
        }
    least = fmin(least, d->p->plan.speedup);
    const double span = most - least, step = span < 1.2 ? 0.2 : span < 3.5 ? 0.5 : span < 8 ? 1 : ceil(span / 8);
    d->low = floor(least / step + 1e-9) * step;
    d->high = ceil(most / step - 1e-9) * step;
    if (d->high <= d->low)
        d->high = d->low + step;
    return step;
}

static void put_axes(const struct drawing *d, double step)
{
    for (double at = d->low; at <= d->high + step / 2; at += step) {
        const double y = y_of(d, at);
        fprintf(d->to, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", LEFT, WIDTH - RIGHT, y, y,
                fabs(at - 1) < 1e-9 ? "#8a9099" : "#dcdfe4");
        fprintf(d->to, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\" fill=\"#4a4f57\">%.1fx</text>\n", LEFT - 8, y + 4,
                at);
    }
    for (int percent = 0; percent <= 100; percent += 10) {
        const double x = x_of(percent / 100.0);
        fprintf(d->to, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\" stroke=\"#dcdfe4\"/>\n", x, x, TOP,
                HEIGHT - BOTTOM + 4);
        fprintf(d->to, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\" fill=\"#4a4f57\">%d %%</text>\n", x,
                HEIGHT - BOTTOM + 18, percent);
    }
    fprintf(
        d->to,
        "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\" fill=\"#4a4f57\">share of the serial time that is transfer, "
        "not compute</text>\n",
        (LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 38);
}

static void put_curves(const struct drawing *d)
{
    for (int c = CURVES - 1; c >= 0; c--) {
        fprintf(d->to, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%g\" stroke-linejoin=\"round\" points=\"",
                looks[c].color, looks[c].width);
        for (int i = 0; i < POINTS; i++)
            fprintf(d->to, "%s%.1f,%.1f", i > 0 ? " " : "", x_of(d->points[i].share), y_of(d, d->points[i].speedup[c]));
        fprintf(d->to, "\"><title>%d buffer%s</title></polyline>\n", c + 1, c > 0 ? "s" : "");
    }
}

static void put_legend(const struct drawing *d)
{
    int x = LEFT;

    for (int c = 0; c < CURVES; c++, x += 92) {
        fprintf(d->to, "<line x1=\"%d\" x2=\"%d\" y1=\"50\" y2=\"50\" stroke=\"%s\" stroke-width=\"%g\"/>\n", x, x + 20,
                looks[c].color, looks[c].width);
        fprintf(d->to, "<text x=\"%d\" y=\"54\">%d buffer%s</text>\n", x + 26, c + 1, c > 0 ? "s" : "");
    }
}

/* The work itself, and what it is called in the legend. */
static void put_mark(const struct drawing *d)
{
    static const char
        circle[] = "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"5\" fill=\"#16181d\" stroke=\"#ffffff\" stroke-width=\"2\"/>\n";
    const side_plan *plan = &d->p->plan;
    const double share = planning_share(plan, &d->p->work);
    const int legend = LEFT + CURVES * 92 + 10;

    fprintf(d->to, circle, x_of(share), y_of(d, plan->speedup));
    fprintf(d->to, circle, (double)legend, 50.0);
    fprintf(d->to, "<text x=\"%d\" y=\"54\" font-weight=\"600\">this work: %.0f %%, %.2fx with %u buffer%s</text>\n",
            legend + 10, share * 100, plan->speedup, plan->depth, plan->depth > 1 ? "s" : "");
}

static void put_document(struct drawing *d)
{
    const side_plan_work *w = &d->p->work;
    char in[32], out[32], title[160];
    const double step = scale(d);

    snprintf(title, sizeof(title), "What overlap gives: %llu items, %s in%s%s%s%s", (unsigned long long)w->items,
             bytes_text(w->item_bytes, in), w->pageable ? " from pageable memory" : "", w->result_bytes > 0 ? ", " : "",
             w->result_bytes > 0 ? bytes_text(w->result_bytes, out) : "", w->result_bytes > 0 ? " back" : "");
    fprintf(d->to,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
            "font-family=\"system-ui,sans-serif\" font-size=\"12\" fill=\"#16181d\">\n<title>%s</title>\n"
            "<rect x=\"0.5\" y=\"0.5\" width=\"%d\" height=\"%d\" rx=\"6\" fill=\"#ffffff\" stroke=\"#c9cdd3\"/>\n"
            "<text x=\"16\" y=\"29\" font-size=\"15\" font-weight=\"600\">%s</text>\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT, title, WIDTH - 1, HEIGHT - 1, title);
    put_legend(d);
    put_axes(d, step);
    put_curves(d);
    put_mark(d);
    fputs("<text x=\"16\" y=\"424\" fill=\"#4a4f57\">", d->to);
    put_text(d->to, d->p->name);
    fputs("; figures ", d->to);
    put_text(d->to, d->p->source);
    fputs("</text>\n</svg>\n", d->to);
}

int planning_svg(struct planning *p)
{
    struct drawing *d = calloc(1, sizeof(*d));
    char *text = NULL;
    size_t bytes = 0;
    side_status status = SIDE_NO_MEMORY;

    if (d != NULL) {
        d->p = p;
        status = plan_points(d);
    }
    if (status == SIDE_OK) {
        d->to = open_memstream(&text, &bytes);
        status = d->to != NULL ? SIDE_OK : SIDE_NO_MEMORY;
    }
    if (status == SIDE_OK) {
        put_document(d);
        if (fclose(d->to) != 0)
            status = SIDE_NO_MEMORY;
    }
    if (status == SIDE_OK && output_write(&p->svg, text, bytes) != 0)
        status = SIDE_IO;
    free(text);
    free(d);
    if (status == SIDE_CANCELLED) {
        say("interrupted; no drawing");
        return EXIT_INTERRUPTED;
    }
    return status == SIDE_OK ? output_commit(&p->svg) : output_failed(&p->svg, status);
}
